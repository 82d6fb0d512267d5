"""Ends a child whose parent has died.

A child notices its parent's death by the end of its standard input or a socket, and ends in order. A stopped child
can't; the system sends it a signal.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def signal_at_parents_death(number: signal.Signals = signal.SIGKILL) -> None:
    """Send this process the signal when its parent's thread ends: on Linux, see prctl(2). No effect elsewhere. The
    parent must start it from a thread that lives as long as the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
