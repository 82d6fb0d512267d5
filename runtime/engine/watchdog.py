"""Notices that the device has stopped, or that the loop turns for nothing, so that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable

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
