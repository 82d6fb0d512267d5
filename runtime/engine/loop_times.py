"""Where the time of the engine's loop goes: work, waits for marks, waits with nothing to do."""

from __future__ import annotations

from collections.abc import Callable


class LoopTimes:
    """Seconds since it was made, on `clock`. each: is told of every wait, from and to."""

    def __init__(self, clock: Callable[[], float], each: Callable[[float, float], None]) -> None:
        self._clock = clock
        self._each = each
        self._started_at = clock()
        self._waited_s = 0.0  # on marks and arrivals
        self._nothing_to_do_s = 0.0  # of these, on arrivals alone

    def waited(self, begun: float) -> float:
        """The loop waited for a mark, or an arrival meanwhile, until now. Returns the seconds."""
        now = self._clock()
        self._each(begun, now)
        self._waited_s += now - begun
        return now - begun

    def had_nothing_to_do(self, begun: float) -> None:
        """The loop waited for an arrival alone, until now."""
        self._nothing_to_do_s += self.waited(begun)

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started_at

    @property
    def work_s(self) -> float:
        """While there was something to do."""
        return self.uptime_s - self._nothing_to_do_s

    @property
    def host_s(self) -> float:
        """Without any wait."""
        return self.uptime_s - self._waited_s
