"""Rate limits log lines that outsiders can cause."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_MOST_KINDS: Final = 256
_OTHERS: Final = "others"


@dataclass(slots=True)
class _Window:
    began: float
    lines: int = 0
    left_out: int = 0


class LineBudget:
    """Limits lines of each kind in a time window; the next line of a kind reports the suppressed number.

    lines: of a kind in `window_s` seconds. At most 256 kinds in that time; later ones share one.
    clock: seconds.
    """

    def __init__(self, lines: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines = lines
        self._window_s = window_s
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    def take(self, kind: str) -> int | None:
        """Return None for a suppressed line, otherwise the number suppressed since the last one."""
        now = self._clock()
        if kind not in self._windows and len(self._windows) >= _MOST_KINDS:
            self._forget_old(now)
            kind = kind if len(self._windows) < _MOST_KINDS else _OTHERS
        window = self._windows.setdefault(kind, _Window(now))
        if now - window.began >= self._window_s:
            window.began, window.lines = now, 0
        if window.lines >= self._lines:
            window.left_out += 1
            return None
        window.lines += 1
        left_out, window.left_out = window.left_out, 0
        return left_out

    def _forget_old(self, now: float) -> None:
        """Forget old kinds. Their suppressed lines are added to the shared kind's."""
        old = [kind for kind, window in self._windows.items() if now - window.began >= self._window_s]
        left_out = sum(self._windows.pop(kind).left_out for kind in old)
        if left_out:
            self._windows.setdefault(_OTHERS, _Window(now)).left_out += left_out
