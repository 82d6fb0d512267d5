"""Turns lines that libraries write to standard error into log events, and limits lines that outsiders can cause.

gRPC's core writes such lines from many threads, and clients can cause some and choose words in them, such as the text
in a connection's last frame. So the process gets a pipe as standard error, which the supervisor reads: each line
becomes an event, shortened and without control characters, and lines from one source location are rate limited. Crash
messages arrive too, since another process reads the pipe.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import select
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import structlog

from runahead.runtime import log_output

_MOST_KINDS: Final = 256
_OTHERS: Final = "others"

_LINES: Final = 20  # of one source location, within the time below
_WINDOW_S: Final = 60.0
_MOST_BYTES: Final = 4096  # of a line that are examined
_PIPE_BYTES: Final = 1 << 20  # room for 256 unread writes of at most 4 KiB
_MOST_CHARACTERS: Final = 300  # of a line that are logged

# The beginning of Abseil's lines: severity, date, time, thread, source location.
_ABSEIL: Final = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ ([\w./-]{1,100}:\d{1,6})\] (.*)")
_LEVELS: Final = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}

log = structlog.get_logger(__name__)


class LibraryLines(asyncio.Protocol):
    """Reads one process's pipe until its end. process: its name."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._rest = b""  # an incomplete line
        self._rest_begins = False  # whether it began a write
        self._goes_on = False  # the next data continues the last write
        self._budget = LineBudget(_LINES, _WINDOW_S)
        self._ended = asyncio.Event()

    @classmethod
    async def of(cls, process: str) -> tuple[LibraryLines, int]:
        """Begin to read. Also returns the descriptor for the process's standard error, which the caller closes after
        passing it on. Writes never block: excess is lost. Raises OSError.
        """
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
        """Return when everything is read and no process has the pipe."""
        await self._ended.wait()

    def data_received(self, data: bytes) -> None:
        """Log complete lines and keep an incomplete one up to a bound.

        data: of one write. The library writes a whole line at once, so a line in the middle of a write is text,
        whatever its beginning.
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
        """Log a line. begins: it began a write, so it may carry the library's level and location."""
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
    """Make a pipe's reader and writer in packet mode, in which a read returns one write. Systems without it (gVisor)
    get a plain pipe, and a line's level and location may be lost or invented.
    """
    try:
        reader, writer = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return os.pipe()
    with suppress(OSError):  # the user's pipe quota is used up
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return reader, writer


def printable(text: str) -> str:
    """Shorten a text and replace unprintable characters."""
    return log_output.printable(text[:_MOST_CHARACTERS])


@dataclass(slots=True)
class _Window:
    began: float
    lines: int = 0
    left_out: int = 0


class LineBudget:
    """Limits lines of each kind in a time window; the next line of a kind reports the suppressed number.

    lines: of a kind in `window_s` seconds. At most 256 kinds in that time; later ones share one.
    clock: seconds.
    """

    def __init__(self, lines: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines = lines
        self._window_s = window_s
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    def take(self, kind: str) -> int | None:
        """Return None for a suppressed line, otherwise the number suppressed since the last one."""
        now = self._clock()
        if kind not in self._windows and len(self._windows) >= _MOST_KINDS:
            self._forget_old(now)
            kind = kind if len(self._windows) < _MOST_KINDS else _OTHERS
        window = self._windows.setdefault(kind, _Window(now))
        if now - window.began >= self._window_s:
            window.began, window.lines = now, 0
        if window.lines >= self._lines:
            window.left_out += 1
            return None
        window.lines += 1
        left_out, window.left_out = window.left_out, 0
        return left_out

    def _forget_old(self, now: float) -> None:
        """Forget old kinds. Their suppressed lines are added to the shared kind's."""
        old = [kind for kind, window in self._windows.items() if now - window.began >= self._window_s]
        left_out = sum(self._windows.pop(kind).left_out for kind in old)
        if left_out:
            self._windows.setdefault(_OTHERS, _Window(now)).left_out += left_out
