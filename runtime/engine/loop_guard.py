"""Stops a process whose engine loop has stopped turning: a call that never returns can't raise by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

_LOOKS: Final = 8  # within the limit: it is noticed at most so much of it late


class LoopGuard:
    """Looks from a thread of its own whether the loop still turns.

    turns: how often the loop has turned. limit_s: for how long it may stand still. stop: called once, if it does.
    """

    def __init__(self, turns: Callable[[], int], limit_s: float, stop: Callable[[], None]) -> None:
        self._turns = turns
        self._limit_s = limit_s
        self._stop = stop
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-guard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """The loop has ended in order."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        seen, looks = self._turns(), 0
        while not self._ended.wait(self._limit_s / _LOOKS):
            turns = self._turns()
            seen, looks = (seen, looks + 1) if turns == seen else (turns, 0)
            if looks == _LOOKS:
                self._stop()
                return
