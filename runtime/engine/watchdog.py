"""Notices that the device or the loop has stopped, or that the loop turns for nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from runahead.cuda_graphs.device import DeviceError
from runahead.runtime.stall import Stall


class LaunchHungError(DeviceError):
    """No mark of a launch in flight has come for too long."""


class NoProgressError(RuntimeError):
    """Requests are being served, and none has come any further for too long."""


class Watchdog:
    """limit_s: how long launches may be in flight without a mark, and requests be served without a token or a chunk, of
    the time in which the loop itself ran.

    clock: seconds, monotonic.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._marks = Stall(limit_s)
        self._work = Stall(limit_s)

    def look(self, in_flight: int, marks: tuple[int, ...], requests: int, work: tuple[int, ...]) -> None:
        """Called after every wait. marks: of launches. work: done for requests.

        Raises LaunchHungError or NoProgressError.
        """
        now = self._clock()
        unmoved_s = self._marks.seconds(now, in_flight > 0, marks)
        if unmoved_s > self.limit_s:
            raise LaunchHungError(f"{in_flight} launches are in flight and none has moved for {self.limit_s:g} s")
        # The last mark before a launch hangs may have brought no token. So launches that have not moved of late are
        # given the rest of their own time first: else the requests' would be over just before, and the device would not
        # be blamed.
        if self._work.seconds(now, requests > 0, work) > self.limit_s and unmoved_s < self.limit_s / 2:
            raise NoProgressError(f"{requests} requests are served and none has come further for {self.limit_s:g} s")


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
