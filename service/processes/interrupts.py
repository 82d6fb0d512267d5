"""Signals of a terminal, which every process of the service receives: only the supervisor acts on them."""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

OF_A_TERMINAL: Final = (signal.SIGINT, signal.SIGHUP)  # Ctrl-C, and when it closes


@contextmanager
def blocked_interrupts() -> Iterator[None]:
    """Block a terminal's signals in processes started inside, also while their modules load."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_A_TERMINAL)
    try:
        yield
    finally:  # bodies may overlap; the first one restores the mask
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*OF_A_TERMINAL} - before)


async def started(command: Sequence[str], pass_fds: Sequence[int] = ()) -> Process:
    """Start a process with pipes for standard input and output, and a terminal's signals blocked. pass_fds: inherited
    descriptors. Raises OSError.
    """
    with blocked_interrupts():
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, pass_fds=pass_fds)
