"""What libraries print on the standard error of a process that serves clients, as events of ours.

gRPC's core prints lines of its own there, by itself and in many of its threads, and clients can cause some of them and
choose words in them: a connection's last frame may carry a text that is printed as it is. So such a process has a pipe
for its standard error, which the supervisor reads: each line becomes an event, cut and without characters that a
terminal would act on, and of each place in the library's source some lines in a minute are logged and the rest counted.
What a process says when it crashes arrives, too, since somebody else reads it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import select
from contextlib import suppress
from typing import Final

import structlog

from runahead.runtime import log_output
from runahead.service.log.line_budget import LineBudget

_LINES: Final = 20  # of one place in the source, in so many seconds
_WINDOW_S: Final = 60.0
_MOST_BYTES: Final = 4096  # of a line that is looked at
_PIPE_BYTES: Final = 1 << 20  # 256 writes, of 4 KiB at most, that nobody has read
_MOST_CHARACTERS: Final = 300  # of it that are logged

# As Abseil's log begins a line: severity, month and day, time, thread, place in the source.
_ABSEIL: Final = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ ([\w./-]{1,100}:\d{1,6})\] (.*)")
_LEVELS: Final = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}

log = structlog.get_logger(__name__)


class LibraryLines(asyncio.Protocol):
    """Reads one process's pipe until its end. process: what the process is called."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._rest = b""  # of a line without an end
        self._rest_begins = False  # as a write did
        self._goes_on = False  # the last write, in what comes next
        self._budget = LineBudget(_LINES, _WINDOW_S)
        self._ended = asyncio.Event()

    @classmethod
    async def of(cls, process: str) -> tuple[LibraryLines, int]:
        """Begins to read. Returns the descriptor, too, that a process is to have for standard error. Whoever hands it
        on closes it then. Writing to it never waits: what does not fit is lost. Raises OSError."""
        lines = cls(process)
        reader, writer = _pipe_of_writes()
        os.set_blocking(writer, False)
        pipe = os.fdopen(reader, "rb", 0)
        try:
            await asyncio.get_running_loop().connect_read_pipe(lambda: lines, pipe)
        except BaseException:
            pipe.close()
            os.close(writer)
            raise
        return lines, writer

    async def wait_ended(self) -> None:
        """Returns when all is read, the last words too: nobody has the pipe any more."""
        await self._ended.wait()

    def data_received(self, data: bytes) -> None:
        """Whole lines are logged; what is left waits for the rest of its line, up to a bound.

        data: of one write. The library writes a line at once, so that a line inside of a write is words in it, whatever
        it begins with.
        """
        begins = self._rest_begins if self._rest else not self._goes_on
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._log(line, begins)
            begins = False
        self._rest, self._rest_begins = rest[:_MOST_BYTES], begins
        self._goes_on = len(data) % select.PIPE_BUF == 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._log(self._rest, self._rest_begins)
        self._ended.set()

    def _log(self, line: bytes, begins: bool) -> None:
        """begins: as a write did, so that the library may have said level and place."""
        text = line[:_MOST_BYTES].decode(errors="replace").strip()
        if not text:
            return
        found = _ABSEIL.match(text) if begins else None
        level, source, message = (_LEVELS[found[1]], found[2], found[3]) if found else (logging.WARNING, "", text)
        left_out = self._budget.take(source)
        if left_out is None:
            return
        fields = {"source": source} if source else {}
        if left_out:
            fields["left_out"] = str(left_out)
        log.log(level, "library_line", process=self._process, message=printable(message), **fields)


def _pipe_of_writes() -> tuple[int, int]:
    """Reader and writer of a pipe of which one read gives what one write has put in. Where the system has no such pipe
    (gVisor), it is one as any other, and a line's level and place may be lost or made up."""
    try:
        reader, writer = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return os.pipe()
    with suppress(OSError):  # the user has too much in pipes
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return reader, writer


def printable(text: str) -> str:
    """The beginning of a text, with a mark for each character that is none to be seen."""
    return log_output.printable(text[:_MOST_CHARACTERS])
