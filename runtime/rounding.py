"""How many pieces of a size a number needs."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Count = TypeVar("Count", int, NDArray[np.int32], NDArray[np.int64])


def ceil_div(count: Count, size: int) -> Count:
    """Pieces of `size` that hold `count`: count / size, rounded up. A number, or an array [n] of them."""
    return -(-count // size)
