"""Shows a start's progress: loaded weights and captured graphs.

A terminal gets a bar, redrawn in place, and one log line at the end; otherwise there are log lines, one for each tenth
of the bytes and each quarter of the graphs.
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

Progress = Callable[[int, int], None]  # amount done, and in all
_Say = Callable[[int, int], None]  # writes a log line

_WIDTH: Final = 30  # characters of a bar
_ERASE: Final = "\x1b[2K"  # the cursor's line


def shown_loading(output: LogOutput) -> Progress:
    """Return the progress of loaded bytes."""
    log = structlog.get_logger("engine")

    def say(done: int, total: int) -> None:
        log.info("loading", percent=10 * (10 * done // max(total, 1)), bytes=done, of_bytes=total)

    if draws_on_a_terminal(output):
        return Bar(sys.stderr, "loading", lambda done, total: f"{_mib(done)} of {_mib(total)} MiB", say)
    return _in_parts(10, say)


def shown_captures(output: LogOutput) -> Progress:
    """Return the progress of captured graphs. A line has the seconds since the first one, and the GPU memory that they
    take.
    """
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
    """Time and memory since this attempt's first graph; a start may make two attempts."""

    def __init__(self) -> None:
        self._log = structlog.get_logger("engine")
        self._begun: tuple[float, int] | None = None  # time, and free bytes of the GPU
        self._done = 0

    def begin(self, done: int) -> None:
        """Begin, unless begun; begin again if fewer graphs are done than before."""
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
    """Return the GPU's free bytes without the allocator's cache: the first capture would return warm-up's leftovers,
    and graphs would seem to take negative memory.
    """
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _in_parts(parts: int, say: _Say) -> Progress:
    """Call `say` for each further fraction of `parts`, beginning again if less is done than before."""
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
    """A line of a terminal, redrawn in place and cleared at the end, when `say` writes the last line.

    amount: words for the amounts done and in all.
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
        line = line[: shutil.get_terminal_size().columns - 1]  # a wrapped line can't be redrawn
        if line != self._drawn:
            # The cursor stays at the line's beginning, so that another process's output does not follow a bar.
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
