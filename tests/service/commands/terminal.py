"""A program on a pseudo-terminal, to which one types, and whose Ctrl-C is a signal as on any other."""

from __future__ import annotations

import codecs
import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

PATIENCE_S: Final = 60.0
_LOOKS: Final = 5  # at a program that waits, in a row
_LOOK_S: Final = 0.01
CTRL_C, CTRL_D = "\x03", "\x04"
# The terminal becomes the one that the program's session is controlled by: without that no key is a signal.
_ON_ITS_TERMINAL: Final = """\
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """What a user sees, and the keys."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a part may end inside a character
        self._unread = ""
        self.shown = ""  # all of it so far, as it was written

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def until(self, text: str) -> str:
        """What is shown up to and with this text, from the end of what was asked for before."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self._unread:
            ready, _, _ = select.select([self._descriptor], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"{text!r} is not shown, but {self._unread!r}"
            self._take(text)
        end = self._unread.index(text) + len(text)
        found, self._unread = self._unread[:end], self._unread[end:]
        return found

    def interrupt(self) -> None:
        """Ctrl-C, when the program waits for a key again. Python's line editor looks for signals as it begins to wait
        and while it does: one that comes between the two, a moment after a key, is heard with the next key only."""
        deadline = time.monotonic() + PATIENCE_S
        looks = 0
        while looks < _LOOKS:
            looks = looks + 1 if self._waits() else 0
            assert time.monotonic() < deadline, "the program does not wait"
            time.sleep(_LOOK_S)
        self.press(CTRL_C)

    def _waits(self) -> bool:
        """Its first thread does nothing, as Linux has it."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "S"

    def ends(self) -> int:
        """The exit status, when the program has ended by itself."""
        return self.process.wait(PATIENCE_S)

    def _take(self, wanted: str) -> None:
        try:
            read = self._decoder.decode(os.read(self._descriptor, 1 << 16))
        except OSError as error:  # the program has ended
            raise AssertionError(f"{wanted!r} is not shown before the end, but {self._unread!r}") from error
        self._unread += read
        self.shown += read


@contextlib.contextmanager
def on_a_terminal(arguments: Sequence[str]) -> Iterator[Terminal]:
    reader, writer = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", _ON_ITS_TERMINAL, sys.executable, *arguments]
    process = subprocess.Popen(command, stdin=writer, stdout=writer, stderr=writer, env=environment)
    os.close(writer)
    try:
        yield Terminal(process, reader)
    finally:
        process.kill()
        process.wait()
        os.close(reader)
