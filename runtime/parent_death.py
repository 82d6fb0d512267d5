"""The end of a child whose parent is gone.

A child knows by the end of its standard input, or of a socket, that its parent is gone, and ends in order. One that is
stopped does not look: the system tells it by a signal.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def signal_at_parents_death(number: signal.Signals = signal.SIGKILL) -> None:
    """This process gets the signal when the thread ends that started it: on Linux, see prctl(2). Elsewhere nothing
    happens. The thread has to live as long as the parent, as a main thread does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
