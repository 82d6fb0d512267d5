"""Describes how a process ended, and ends a child whose parent has died.

A child notices its parent's death by the end of its standard input or a socket, and ends in order. A stopped child
can't; the system sends it a signal.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def described(code: int) -> str:
    """Describe an exit code in words. code: like `subprocess`, below 0 for a signal."""
    return f"exit code {code}" if code >= 0 else f"signal {signal_name(code)}"


def signal_name(code: int) -> str:
    """Return the name of the signal that ended a process, empty without one."""
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:  # unnamed, such as real-time signals
        return str(-code)


def end_fields(code: int) -> dict[str, int | str]:
    """Return log fields for an exit code."""
    return {"exit_code": code} | ({"signal": signal_name(code)} if code < 0 else {})


def signal_at_parents_death(number: signal.Signals = signal.SIGKILL) -> None:
    """Send this process the signal when its parent's thread ends: on Linux, see prctl(2). No effect elsewhere. The
    parent must start it from a thread that lives as long as the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
