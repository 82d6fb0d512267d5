"""How the engine watches its mask worker: what it writes to standard error, and how long it works at one order."""

from __future__ import annotations

import os
import re
import time
from typing import Final

from runahead.runtime.stall import Stall

_HARMLESS: Final = re.compile(
    r"the mask worker has met a [A-Za-z_]{1,60} and ends"
    r"|thread '[A-Za-z0-9_<>-]{1,40}' (\(\d+\) )?panicked at [A-Za-z0-9_./-]{1,200}\.rs:\d+:\d+:?"
)
_LONGEST_LINE: Final = 1 << 10
_READ_BYTES: Final = 1 << 16


class WorkerErrors:
    """The reading end of a pipe, whose other end is a process's standard error. Nothing here ever blocks."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._begun = b""  # of a line whose end was not read yet
        self.withheld = 0  # lines that were not passed on

    def lines(self) -> list[str]:
        """Those written since the last call that may be logged."""
        found = []
        try:
            data = os.read(self._pipe, _READ_BYTES)
        except BlockingIOError:
            return []
        *lines, self._begun = (self._begun + data).split(b"\n")
        self._begun = self._begun[: _LONGEST_LINE + 1]  # too long to be harmless, and so it stays
        for line in lines:
            text = line[: _LONGEST_LINE + 1].decode("utf-8", "replace")
            if _HARMLESS.fullmatch(text):
                found.append(text)
            elif text.strip():
                self.withheld += 1
        return found


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
