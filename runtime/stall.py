"""For how long a figure stands still, as counted by whoever watches it."""

from __future__ import annotations

from typing import Final

_LOOKS: Final = 8  # within a limit
_LEAST_GAP_S: Final = 0.5


class Stall:
    """Seconds for which a figure has not changed while it should, of the time in which the watcher itself ran.

    A process that was stopped with its watcher, or a machine that stood still, looks like a long gap between two looks.
    So a gap counts for an eighth of the limit at most, or half a second: whoever watches looks more often than that.
    """

    def __init__(self, limit_s: float) -> None:
        self._most_gap_s = max(limit_s / _LOOKS, _LEAST_GAP_S)
        self._figure: tuple[int, ...] = ()
        self._looked_at: float | None = None
        self._still_s = 0.0
        self.has_moved = False  # as the newest look has it: the time begins there

    def seconds(self, now: float, is_awaited: bool, figure: tuple[int, ...]) -> float:
        """Looks. now: seconds of a monotonic clock."""
        self.has_moved = not is_awaited or figure != self._figure or self._looked_at is None
        if self.has_moved or self._looked_at is None:
            self._figure, self._still_s = figure, 0.0
        else:
            self._still_s += min(now - self._looked_at, self._most_gap_s)
        self._looked_at = now
        return self._still_s
