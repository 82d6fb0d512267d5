"""Rounding up."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Count = TypeVar("Count", int, NDArray[np.int32], NDArray[np.int64])


def ceil_div(count: Count, size: int) -> Count:
    """Return count / size, rounded up: a number, or an array [n]."""
    return -(-count // size)
