"""Measures how long a figure has stood still, in its watcher's running time."""

from __future__ import annotations

from typing import Final

_CHECKS: Final = 8  # checks within a limit
_LEAST_GAP_S: Final = 0.5


class Stall:
    """Seconds for which a figure has not changed although it should, while the watcher itself ran.

    If the watcher or the machine was stopped, two checks are far apart. So a gap counts for an eighth of the limit at
    most, or half a second: the watcher must check more often.
    """

    def __init__(self, limit_s: float) -> None:
        self._most_gap_s = max(limit_s / _CHECKS, _LEAST_GAP_S)
        self._figure: tuple[int, ...] = ()
        self._looked_at: float | None = None
        self._still_s = 0.0
        self.has_moved = False  # whether the newest check saw a change, which restarts the time

    def seconds(self, now: float, is_awaited: bool, figure: tuple[int, ...]) -> float:
        """Check the figure, and return the seconds. now: monotonic, in seconds."""
        self.has_moved = not is_awaited or figure != self._figure or self._looked_at is None
        if self.has_moved or self._looked_at is None:
            self._figure, self._still_s = figure, 0.0
        else:
            self._still_s += min(now - self._looked_at, self._most_gap_s)
        self._looked_at = now
        return self._still_s
