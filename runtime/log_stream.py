"""Standard error as a stream whose writes neither block nor raise.

Whoever reads a log may go away or stand still, and a disk may be full: that costs lines, which are counted, and nothing
else. Lines wait in a bounded buffer for a thread that writes them.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import signal
import sys
import threading
from queue import SimpleQueue
from typing import Final

_MOST_BYTES: Final = 1 << 20  # that wait to be written
_LAST_S: Final = 1.0  # for the buffer to be written when the process ends


class LogStream(io.TextIOBase):
    """Writes whole lines to a descriptor from a thread.

    A line is dropped and counted where the buffer is full or the descriptor can't be written to. The next line is tried
    anew. Text without a line's end waits for it, or for `flush`.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, descriptor: int, most_bytes: int = _MOST_BYTES) -> None:
        self._descriptor = descriptor
        self._most_bytes = most_bytes
        self._partial = ""
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        # Garbage collection may call `write` inside of `write`: neither the queue nor this lock minds.
        self._lock = threading.RLock()
        self._taken_bytes = 0
        self._done_bytes = 0
        self._dropped = memoryview(bytearray(8)).cast("q")
        self._is_torn = False  # the last line written is not whole
        self._is_over = False
        self._thread = threading.Thread(target=self._write_all, name="log-writer", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    @property
    def dropped(self) -> int:
        """Lines."""
        return self._dropped[0]

    def count_in(self, cell: memoryview) -> None:
        """Counts dropped lines there from now on, beside those that are counted there already. cell: int64 [1]."""
        with self._lock:
            cell[0] += self._dropped[0]
            self._dropped = cell

    def write(self, text: str) -> int:
        with self._lock:
            whole, newline, self._partial = (self._partial + text).rpartition("\n")
            self._put(whole + newline)
        return len(text)

    def flush(self) -> None:
        """Hands over what has no line's end, and does not wait until it is written."""
        with self._lock:
            partial, self._partial = self._partial, ""
            self._put(partial)

    def end(self) -> None:
        """Waits for a second at most until everything is written. What comes later is dropped. Idempotent."""
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
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the thread that expects them
        while (data := self._lines.get()) is not None:
            try:
                self._write_one(data)
            except OSError:
                self._drop(data)
            self._done_bytes += len(data)

    def _write_one(self, data: bytes) -> None:
        """One write for each: several processes write to the same descriptor. Raises OSError."""
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
    """Makes standard error such a stream. Idempotent."""
    if isinstance(sys.stderr, LogStream):
        return
    if sys.stderr is None:  # it was closed when the process began
        sys.stderr = LogStream(os.open(os.devnull, os.O_WRONLY))
    else:
        sys.stderr.flush()
        sys.stderr = LogStream(sys.stderr.fileno())


def count_dropped_lines_in(cell: memoryview) -> None:
    """Of this process's log, from now on. cell: int64 [1]."""
    if isinstance(sys.stderr, LogStream):
        sys.stderr.count_in(cell)


def end_log() -> None:
    """Writes what can be written of this process's log in a second: before an exit that runs no handlers."""
    if isinstance(sys.stderr, LogStream):
        sys.stderr.end()
