"""Log-probabilities of a chosen token and of the top tokens for rows of logits.

Rows are computed one at a time with integer sums of probability mass: no neighbor, order or number of threads changes a
bit. Used for S's sampled tokens and F's prompt tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.kernels.reference.philox import exp32
from runahead.runtime.kernels.reference.sampling_filters import MASS_ONE, highest, masses

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """Log-probabilities of n rows; zeros for rows that did not ask and beyond the requested number."""

    chosen: F32  # [n]
    top_ids: I32  # [n, max_top] most likely first
    top: F32  # [n, max_top]


def log_probabilities(logits: F32, chosen: NDArray[np.int64], asked: I32, max_top: int) -> LogProbabilities:
    """Compute the log-softmax of raw logits [n, vocab] at `chosen` [n] and at the top `asked` [n] tokens.

    asked: -1 skips the row; others' logits must be finite. A token too unlikely for float32 has a log-probability of
    -inf.
    """
    with np.errstate(over="ignore"):
        return _log_probabilities(logits, chosen, asked, max_top)


def _log_probabilities(logits: F32, chosen: NDArray[np.int64], asked: I32, max_top: int) -> LogProbabilities:
    rows, vocab_size = logits.shape
    found = LogProbabilities(
        np.zeros(rows, np.float32), np.zeros((rows, max_top), np.int32), np.zeros((rows, max_top), np.float32)
    )
    for row in np.flatnonzero(asked >= 0).tolist():
        shifted = logits[row] - logits[row].max()
        normalizer = log_normalizer(shifted)
        found.chosen[row] = float(shifted[chosen[row]]) - normalizer
        count = min(int(asked[row]), max_top, vocab_size)
        if count > 0:
            found.top_ids[row, :count] = ids = highest(logits[row], count)
            found.top[row, :count] = shifted[ids].astype(np.float64) - normalizer
    return found


def log_normalizer(shifted: F32) -> float:
    """Return log(sum(e**x)) over `shifted`, [vocab], whose maximum is 0."""
    return math.log(int(masses(exp32(shifted)).sum()) / MASS_ONE)
