"""Logs a start's progress: a line for each tenth of the loaded bytes and each quarter of the captured graphs."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
import torch

Progress = Callable[[int, int], None]  # amount done, and in all
_Say = Callable[[int, int], None]  # writes a log line


def shown_loading() -> Progress:
    """Return the progress of loaded bytes."""
    log = structlog.get_logger("engine")

    def say(done: int, total: int) -> None:
        log.info("loading", percent=10 * (10 * done // max(total, 1)), bytes=done, of_bytes=total)

    return _in_parts(10, say)


def shown_captures() -> Progress:
    """Return the progress of captured graphs. A line has the seconds since the first one, and the GPU memory that they
    take.
    """
    captures = _Captures()
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
