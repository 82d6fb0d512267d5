"""Ctrl-C at a terminal, which every process of the service receives: only the supervisor acts on it."""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def blocked_interrupts() -> Iterator[None]:
    """Block SIGINT in processes started inside, also while their modules load."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        if signal.SIGINT not in before:  # bodies may overlap; the first one restores the mask
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))


async def started(command: Sequence[str], pass_fds: Sequence[int] = ()) -> Process:
    """Start a process with pipes for standard input and output, and SIGINT blocked. pass_fds: inherited descriptors.
    Raises OSError.
    """
    with blocked_interrupts():
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, pass_fds=pass_fds)
