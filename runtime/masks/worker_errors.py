"""What the mask worker writes to its standard error: the library's panics, mostly. None of it is logged as it is.

A panic's second line may repeat whatever the library was given, a grammar or tokens. So a line is passed on where it is
of a form that has no room for those, and all others are only counted.
"""

from __future__ import annotations

import os
import re
from typing import Final

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
