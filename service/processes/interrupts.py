"""Ctrl-C on a terminal, which every process of the service gets: the supervisor alone decides what it means."""

from __future__ import annotations

import signal
from collections.abc import Iterator
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
