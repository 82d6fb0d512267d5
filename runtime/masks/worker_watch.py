"""Watches the mask worker: its standard error, and its time for one order."""

from __future__ import annotations

import os
import re
import time
from typing import Final

from runahead.runtime.watchdog import Stall

_HARMLESS: Final = re.compile(
    r"the mask worker has met a [A-Za-z_]{1,60} and ends"
    r"|thread '[A-Za-z0-9_<>-]{1,40}' (\(\d+\) )?panicked at [A-Za-z0-9_./-]{1,200}\.rs:\d+:\d+:?"
)
_LONGEST_LINE: Final = 1 << 10
_READ_BYTES: Final = 1 << 16


class WorkerErrors:
    """The reading end of a process's standard error. Never blocks."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._begun = b""  # an incomplete line
        self.withheld = 0  # lines that were not passed on

    def lines(self) -> list[str]:
        """Return the complete lines since the last call that may be logged."""
        found = []
        try:
            data = os.read(self._pipe, _READ_BYTES)
        except BlockingIOError:
            return []
        *lines, self._begun = (self._begun + data).split(b"\n")
        self._begun = self._begun[: _LONGEST_LINE + 1]  # too long to be logged, and stays so
        for line in lines:
            text = line[: _LONGEST_LINE + 1].decode("utf-8", "replace")
            if _HARMLESS.fullmatch(text):
                found.append(text)
            elif text.strip():
                self.withheld += 1
        return found


_PROCESS_CLOCK: Final = 2  # CPUCLOCK_SCHED of Linux: all threads of a process, user and system time


class Overdue:
    """Detects overdue work. processor_s: of the process's time for one piece of work. running_s: of the watching
    process's running time, which detects a stopped or blocked process.
    """

    def __init__(self, processor_s: float, running_s: float) -> None:
        self._processor_s = processor_s
        self._running_s = running_s
        self._stall = Stall(running_s)
        self._spent_s = 0.0  # when the work began

    def why(self, now: float, pid: int, is_awaited: bool, done: int) -> str:
        """Check, and return why the process is overdue, empty if it is not. now: monotonic, in seconds. done: pieces of
        work.
        """
        if not is_awaited:  # no check either: by the next one more is done, and the time begins with the order
            return ""
        still_s = self._stall.seconds(now, is_awaited, (done,))
        spent_s = processor_s(pid)
        if self._stall.has_moved:
            self._spent_s = spent_s
        if spent_s - self._spent_s >= self._processor_s:
            return f"it has been at one order for {self._processor_s:g} s of processor time"
        return f"it has carried out nothing for {self._running_s:g} s" if still_s >= self._running_s else ""


def processor_s(pid: int) -> float:
    """Return a process's processor time in seconds, 0 if unknown or ended."""
    try:
        return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)
    except OSError:
        return 0.0
