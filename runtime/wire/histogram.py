"""Histograms of times with fixed bounds, so that engines' counts can be added."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Ten bounds a decade, from 10 µs to 1,000 s: each 1.26 times the previous one, rounded to four digits.
BOUNDS_S: Final = tuple(float(f"{10 ** (step / 10 - 5):.3e}") for step in range(81))

_BOUNDS: Final = np.array(BOUNDS_S)
_BUCKETS: Final = len(BOUNDS_S) + 1


class Histogram:
    """A histogram. counts: int64 [len(BOUNDS_S) + 1]; bucket i has times above bound i - 1 up to bound i, the last one
    those above every bound. sum_s: the sum in seconds.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(_BUCKETS, np.int64)
        self.sum_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Add the same time, `times` times."""
        self.counts[bisect.bisect_left(BOUNDS_S, seconds)] += times
        self.sum_s += seconds * times

    def add_each(self, seconds: NDArray[np.float64]) -> None:
        """Add several times, [n]."""
        self.counts += np.bincount(_BOUNDS.searchsorted(seconds), minlength=_BUCKETS)
        self.sum_s += float(np.add.reduce(seconds))


def quantile(counts: Sequence[int], share: float) -> float:
    """Return the time in seconds that the fraction `share` of the times do not exceed, assuming a uniform distribution
    within buckets.

    counts: `Histogram.counts`, not all zero. Times above every bound count as the highest bound.
    """
    wanted, below = share * sum(counts), 0
    for bucket, count in enumerate(counts[:-1]):
        if count and below + count >= wanted:
            low = BOUNDS_S[bucket - 1] if bucket else 0.0
            return low + (BOUNDS_S[bucket] - low) * (wanted - below) / count
        below += count
    return BOUNDS_S[-1]
