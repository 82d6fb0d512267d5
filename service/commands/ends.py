"""Exit statuses of commands, and what they do about interrupts and an output that nobody reads. It loads next to
nothing."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130


def end_at_interrupts() -> None:
    """From now on an interrupt ends the process without a word, unless interrupts are ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def interruptible() -> None:
    """From now on an interrupt raises KeyboardInterrupt, unless interrupts are ignored."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    os._exit(EXIT_INTERRUPTED)


def nobody_reads() -> int:
    """After standard output could not be written. Returns the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
    return EXIT_FAILED
