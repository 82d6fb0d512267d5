"""What a start shows while it lasts: how much of the weights is loaded, and how many graphs are captured.

On a terminal it is a bar, drawn over itself, and one line of the log at the end. Elsewhere it is lines of the log
alone, one for each further tenth of the bytes and each further quarter of the graphs.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

import structlog
import torch

from runahead.runtime.log_output import LogOutput, draws_on_a_terminal

Progress = Callable[[int, int], None]  # how much is done, and how much there is in all
_Say = Callable[[int, int], None]  # writes a line of the log

_WIDTH: Final = 30  # characters of a bar
_ERASE: Final = "\x1b[2K"  # the line that the cursor is in


def shown_loading(output: LogOutput) -> Progress:
    """Takes bytes of the weights."""
    log = structlog.get_logger("engine")

    def say(done: int, total: int) -> None:
        log.info("loading", percent=10 * (10 * done // max(total, 1)), bytes=done, of_bytes=total)

    if draws_on_a_terminal(output):
        return Bar(sys.stderr, "loading", lambda done, total: f"{_mib(done)} of {_mib(total)} MiB", say)
    return _in_parts(10, say)


def shown_captures(output: LogOutput) -> Progress:
    """Takes graphs. A line has the seconds since the first of them was captured, and the memory of the GPU that they
    take."""
    captures = _Captures()
    if draws_on_a_terminal(output):
        shown: Progress = Bar(sys.stderr, "capturing", lambda done, total: f"{done} of {total} graphs", captures.say)
    else:
        shown = _in_parts(4, captures.say)

    def progress(done: int, total: int) -> None:
        captures.begin(done)
        shown(done, total)

    return progress


class _Captures:
    """Since the first graph of this attempt was captured: a start may make two."""

    def __init__(self) -> None:
        self._log = structlog.get_logger("engine")
        self._begun: tuple[float, int] | None = None  # when, and bytes of the GPU that were free
        self._done = 0

    def begin(self, done: int) -> None:
        """Idempotent, but where fewer are done than before."""
        if self._begun is None or done < self._done:
            self._begun = time.monotonic(), _free_bytes()
        self._done = done

    def say(self, done: int, total: int) -> None:
        assert self._begun is not None
        begun, free = self._begun
        taken = free - _free_bytes()
        self._log.info(
            "capturing", graphs=done, of_graphs=total, seconds=round(time.monotonic() - begun, 1), bytes=taken
        )


def _free_bytes() -> int:
    """Of the GPU, without what the allocator keeps for later: what warmed up before the first graph left there would be
    given back by the first capture, and the graphs would seem to take less than nothing."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _in_parts(parts: int, say: _Say) -> Progress:
    """Says each further one of so many parts, and begins anew where less is done than before."""
    said, before = -1, 0

    def progress(done: int, total: int) -> None:
        nonlocal said, before
        if done < before:
            said = -1
        before = done
        part = parts * done // max(total, 1)
        if part > said:
            said = part
            say(done, total)

    return progress


class Bar:
    """One line of a terminal, drawn over itself, and gone at the end, where `say` has the last word.

    amount: of what is done and of all, in words.
    """

    def __init__(self, terminal: TextIO, what: str, amount: Callable[[int, int], str], say: _Say) -> None:
        self._terminal = terminal
        self._what = what
        self._amount = amount
        self._say = say
        self._drawn = ""

    def __call__(self, done: int, total: int) -> None:
        share = done / max(total, 1)
        bar = "#" * int(_WIDTH * share)
        line = f"{self._what} [{bar:<{_WIDTH}}] {int(100 * share):3} %, {self._amount(done, total)}"
        line = line[: shutil.get_terminal_size().columns - 1]  # a line that breaks can't be drawn over
        if line != self._drawn:
            # The cursor is left at the line's begin: what another process writes meanwhile does not stand behind a bar.
            self._draw(f"{_ERASE}{line}\r")
            self._drawn = line
        if done == total:
            self._draw(_ERASE)
            self._say(done, total)

    def _draw(self, text: str) -> None:
        self._terminal.write(text)
        self._terminal.flush()


def _mib(size: int) -> int:
    return size >> 20
