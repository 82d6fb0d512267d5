"""Notices that the device has stopped, so that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable

from cuda_graphs.device import DeviceError


class LaunchHungError(DeviceError):
    """No mark of a launch in flight has come for too long."""


class Watchdog:
    """limit_s: how long launches may be in flight without any mark. clock: seconds, monotonic."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._marks = (0, 0)
        self._moved_at = clock()

    def look(self, in_flight: int, committed: int, ended: int) -> None:
        """Called after every wait. Raises LaunchHungError."""
        now = self._clock()
        if not in_flight or (committed, ended) != self._marks:
            self._marks = (committed, ended)
            self._moved_at = now
        elif now - self._moved_at > self._limit_s:
            raise LaunchHungError(
                f"{in_flight} launches are in flight after launch {ended} and none has moved for {self._limit_s:g} s"
            )
