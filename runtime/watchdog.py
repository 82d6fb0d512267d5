"""Detects a device or a loop that has stopped, and a loop that makes no progress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from runahead.cuda_graphs.device import DeviceError

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
        self._checked_at: float | None = None
        self._still_s = 0.0
        self.has_moved = False  # whether the newest check saw a change, which restarts the time

    def seconds(self, now: float, is_awaited: bool, figure: tuple[int, ...]) -> float:
        """Check the figure, and return the seconds. now: monotonic, in seconds."""
        self.has_moved = not is_awaited or figure != self._figure or self._checked_at is None
        if self.has_moved or self._checked_at is None:
            self._figure, self._still_s = figure, 0.0
        else:
            self._still_s += min(now - self._checked_at, self._most_gap_s)
        self._checked_at = now
        return self._still_s


class LaunchHungError(DeviceError):
    """No launch in flight has set a mark for too long."""


class NoProgressError(RuntimeError):
    """No request that is being served has made progress for too long."""


class Watchdog:
    """Raises if launches or requests stop.

    limit_s: how long launches may be in flight without a mark, and requests be served without a token or a chunk, in
    time during which the loop itself ran. clock: seconds, monotonic.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._marks = Stall(limit_s)
        self._work = Stall(limit_s)

    def check(self, in_flight: int, marks: tuple[int, ...], requests: int, work: tuple[int, ...]) -> None:
        """Check progress. Called after every wait. marks: of launches. work: done for requests.

        Raises LaunchHungError or NoProgressError.
        """
        now = self._clock()
        unmoved_s = self._marks.seconds(now, in_flight > 0, marks)
        if unmoved_s > self.limit_s:
            raise LaunchHungError(f"{in_flight} launches are in flight and none has moved for {self.limit_s:g} s")
        # The last mark before a hang may have brought no token. So launches without a recent mark get the rest of
        # their time first: otherwise the requests' time would end just before, and the error would not name the
        # device.
        if self._work.seconds(now, requests > 0, work) > self.limit_s and unmoved_s < self.limit_s / 2:
            raise NoProgressError(f"{requests} requests are served and none has come further for {self.limit_s:g} s")


class LoopGuard:
    """Checks on a separate thread whether the loop still turns.

    turns: returns how many turns the loop has made. limit_s: how long it may stand still. stop: called once if it does.
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
        """End the thread, when the loop has ended in order."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        seen, checks = self._turns(), 0
        while not self._ended.wait(self._limit_s / _CHECKS):
            turns = self._turns()
            seen, checks = (seen, checks + 1) if turns == seen else (turns, 0)
            if checks == _CHECKS:
                self._stop()
                return
