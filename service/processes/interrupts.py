"""Ctrl-C on a terminal, which every process of the service gets: the supervisor alone decides what it means."""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def blocked_interrupts() -> Iterator[None]:
    """Processes that are started inside begin with SIGINT blocked, while their modules load too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        if signal.SIGINT not in before:  # several may be inside at a time, and the first one alone found it so
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))


async def started(command: Sequence[str], pass_fds: Sequence[int] = ()) -> Process:
    """Start a process with pipes for its standard input and output, and with SIGINT blocked. pass_fds: descriptors that
    it gets, too. Raises OSError."""
    with blocked_interrupts():
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, pass_fds=pass_fds)
