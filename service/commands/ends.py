"""Exit statuses, interrupts and broken output of commands. Imports almost nothing."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

_SHOWN: Final = 80  # characters of a value

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130


class UsageError(ValueError):
    """An invalid flag. One sentence with the flag, what it accepts and its value."""

    @classmethod
    def of(cls, flag: str, accepts: str, given: object) -> UsageError:
        text = repr(given)
        shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
        return cls(f"--{flag.replace('_', '-')} must be {accepts}, and is {shown}")


def end_at_interrupts() -> None:
    """Let an interrupt end the process silently, unless interrupts are ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def interruptible() -> None:
    """Let an interrupt raise KeyboardInterrupt, unless interrupts are ignored."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    os._exit(EXIT_INTERRUPTED)


def nobody_reads() -> int:
    """Handle a broken standard output and return the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # avoids the interpreter's message at exit
    return EXIT_FAILED
