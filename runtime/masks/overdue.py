"""Whether a process has been at one piece of work for too long."""

from __future__ import annotations

import time
from typing import Final

from runahead.runtime.stall import Stall

_PROCESS_CLOCK: Final = 2  # CPUCLOCK_SCHED of Linux: all threads of a process, in user and in system mode


class Overdue:
    """processor_s: of the process's own time that one piece of work may take. running_s: the same of the time in which
    whoever watches it ran, which ends a process that is stopped or waits for ever."""

    def __init__(self, processor_s: float, running_s: float) -> None:
        self._processor_s = processor_s
        self._running_s = running_s
        self._stall = Stall(running_s)
        self._spent_s = 0.0  # when the work began

    def why(self, now: float, pid: int, is_awaited: bool, done: int) -> str:
        """Looks. Empty while it is not overdue. now: seconds of a monotonic clock. done: pieces of work."""
        if not is_awaited:  # no look either: by the next one that is, more is done, and the time begins with the order
            return ""
        still_s = self._stall.seconds(now, is_awaited, (done,))
        spent_s = processor_s(pid)
        if self._stall.has_moved:
            self._spent_s = spent_s
        if spent_s - self._spent_s >= self._processor_s:
            return f"it has been at one order for {self._processor_s:g} s of processor time"
        return f"it has carried out nothing for {self._running_s:g} s" if still_s >= self._running_s else ""


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has taken. 0 where the system does not say, as of one that has ended."""
    try:
        return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)
    except OSError:
        return 0.0
