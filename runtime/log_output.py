"""Sends this process's logs to standard error: text on a terminal, otherwise one JSON object a line.

Front end and engine share one standard error. Prompts and completions are never logged. Writes neither block nor raise:
a log's reader may disappear or stall, and a disk may be full, which only loses lines. They are counted. A thread writes
lines from a bounded buffer.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import select
import signal
import sys
import threading
from queue import SimpleQueue
from typing import Final, Literal

import msgspec
import structlog

_MOST_BYTES: Final = 1 << 20  # waiting to be written
_LAST_S: Final = 1.0  # to write the buffer at the process's end

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "console", "json"]

LEVELS: Final[dict[Level, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class LogOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Log settings.
    level: the least severe logged event: debug, info, warning or error.

    format: console (text), json (one object a line), or auto: console if standard error is a terminal.
    """

    level: Level = "info"
    format: Format = "auto"


def draws_on_a_terminal(output: LogOutput) -> bool:
    """Whether lines may be redrawn in place: standard error is a terminal, and info is logged."""
    return sys.stderr.isatty() and output.format != "json" and LEVELS[output.level] <= logging.INFO


def log_to_stderr(output: LogOutput) -> None:
    """Send this process's events to standard error from now on. Writes then neither block nor raise."""
    stream_stderr()
    on_terminal = sys.stderr.isatty()
    for_people = output.format == "console" or (output.format == "auto" and on_terminal)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            *(_for_people(on_terminal) if for_people else _as_json()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[output.level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


def _as_json() -> list[structlog.typing.Processor]:
    return [
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]


def _fit_to_be_seen(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Replace control characters in an event's texts, which clients may choose, so that the event stays one line. JSON
    escapes them itself.
    """
    return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}


def printable(text: str) -> str:
    """Replace unprintable characters."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _for_people(colors: bool) -> list[structlog.typing.Processor]:
    return [
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        _fit_to_be_seen,
        # A plain traceback: the renderer's shows local variables, and prompts with them.
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback),
    ]


class LogStream(io.TextIOBase):
    """Writes whole lines to a descriptor from a thread.

    A line is dropped and counted if the buffer is full or the descriptor fails; the next line is tried again. Text
    without a line's end waits for it or for `flush`.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, descriptor: int, most_bytes: int = _MOST_BYTES) -> None:
        self._descriptor = descriptor
        self._most_bytes = most_bytes
        self._partial = ""
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        # Garbage collection may call `write` inside `write`: both the queue and this lock are reentrant.
        self._lock = threading.RLock()
        self._taken_bytes = 0
        self._done_bytes = 0
        self._dropped = memoryview(bytearray(8)).cast("q")
        self._is_torn = False  # the last line was written partially
        self._is_over = False
        self._thread = threading.Thread(target=self._write_all, name="log-writer", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    @property
    def dropped(self) -> int:
        """The number of dropped lines."""
        return self._dropped[0]

    def count_in(self, cell: memoryview) -> None:
        """Count dropped lines in this cell from now on, in addition to its count. cell: int64 [1]."""
        with self._lock:
            cell[0] += self._dropped[0]
            self._dropped = cell

    def write(self, text: str) -> int:
        with self._lock:
            whole, newline, self._partial = (self._partial + text).rpartition("\n")
            self._put(whole + newline)
        return len(text)

    def flush(self) -> None:
        """Pass on an incomplete line, without waiting for its write."""
        with self._lock:
            partial, self._partial = self._partial, ""
            self._put(partial)

    def end(self) -> None:
        """Wait at most a second until everything is written. Later lines are dropped. Idempotent."""
        if not self._is_over:
            self.flush()
            self._is_over = True
            self._lines.put(None)
        self._thread.join(_LAST_S)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def _put(self, text: str) -> None:
        if not text:
            return
        data = text.encode(self.encoding, self.errors)
        if self._is_over or self._taken_bytes - self._done_bytes + len(data) > self._most_bytes:
            self._drop(data)
            return
        self._taken_bytes += len(data)
        self._lines.put(data)

    def _drop(self, data: bytes) -> None:
        with self._lock:
            self._dropped[0] += data.count(b"\n")

    # ------------------------------------------------------------ the thread

    def _write_all(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are for the main thread
        while (data := self._lines.get()) is not None:
            try:
                self._write_one(data)
            except OSError:
                self._drop(data)
            self._done_bytes += len(data)

    def _write_one(self, data: bytes) -> None:
        """Write one line in one call: several processes share the descriptor. Raises OSError."""
        rest = b"\n" + data if self._is_torn else data
        while rest:
            try:
                written = os.write(self._descriptor, rest)
            except BlockingIOError:
                self._wait_writable()
                continue
            rest = rest[written:]
            self._is_torn = bool(rest)

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        poll.poll()


def stream_stderr() -> None:
    """Replace standard error by such a stream. Idempotent."""
    if isinstance(sys.stderr, LogStream):
        return
    if sys.stderr is None:  # closed since the process began
        sys.stderr = LogStream(os.open(os.devnull, os.O_WRONLY))
    else:
        sys.stderr.flush()
        sys.stderr = LogStream(sys.stderr.fileno())


def count_dropped_lines_in(cell: memoryview) -> None:
    """Count this process's dropped log lines in this cell from now on. cell: int64 [1]."""
    if isinstance(sys.stderr, LogStream):
        sys.stderr.count_in(cell)


def end_log() -> None:
    """Write this process's log for at most a second, before an exit without handlers."""
    if isinstance(sys.stderr, LogStream):
        sys.stderr.end()
