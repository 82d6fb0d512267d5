"""Restricts a row's candidate tokens: masks and bias on logits, then top-k, top-p and min-p.

Rows are processed one at a time, so they can't depend on each other. Ties go to the lowest token id, and probability
mass is summed as integers, so neither the order of summation nor threads change a bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.kernels.reference.philox import exp32
from runahead.runtime.kernels.row_state import RowState

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
I32 = NDArray[np.int32]

# Fixed-point weight of the most likely token, 1. With 2**18 tokens the sum stays below 2**58.
MASS_ONE: Final = 2.0**40
_FIRST_TRY: Final = 512  # tokens that top-p tries before it sorts the whole row


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of n rows."""

    top_k: I32  # [n] 0: off
    top_p: F32  # [n] 1: off
    min_p: F32  # [n] 0: off

    @staticmethod
    def of(state: RowState, slots: I64) -> Filters:
        """Read the filters of the rows in these slots, [n]."""
        return Filters(state.top_k.numpy()[slots], state.top_p.numpy()[slots], state.min_p.numpy()[slots])

    def are_on(self, vocab_size: int) -> NDArray[np.bool_]:
        """Return which rows have any filter. [n]"""
        on: NDArray[np.bool_] = ((self.top_k > 0) & (self.top_k < vocab_size)) | (self.top_p < 1.0) | (self.min_p > 0.0)
        return on

    def of_row(self, row: int) -> tuple[int, np.float32, np.float32]:
        """Return a row's arguments of `kept_tokens`."""
        return int(self.top_k[row]), self.top_p[row], self.min_p[row]


def mask_disallowed(logits: F32, allowed: I32) -> None:
    """Set logits, [vocab], to -inf if their bit in `allowed`, [ceil(vocab / 32)], is 0."""
    logits[~bits(allowed, logits.shape[0])] = -np.inf


def lowest_allowed(allowed: I32, vocab_size: int) -> int:
    """Return the lowest id with its bit set; 0 if there is none."""
    return int(bits(allowed, vocab_size).argmax())


def mask_ids(logits: F32, ids: I32) -> None:
    """Set the logits, [vocab], of `ids` to -inf. Padding ids outside the vocabulary are ignored."""
    logits[ids[(ids >= 0) & (ids < logits.shape[0])]] = -np.inf


def add_bias(logits: F32, ids: I32, values: F32) -> bool:
    """Add `values` to the logits, [vocab], of `ids`, which are distinct; masked ones stay.

    Returns False if a sum overflows float32.
    """
    inside = (ids >= 0) & (ids < logits.shape[0])
    before = logits[ids[inside]]
    logits[ids[inside]] = after = before + values[inside]
    return bool((np.isfinite(after) | (before == -np.inf)).all())


def highest(scores: F32, count: int) -> I64:
    """Return the ids of the `count` highest of `scores`, [vocab], descending, ties by ascending id. No NaN."""
    size = scores.shape[0]
    raw = (scores + np.float32(0.0)).view(np.int32).astype(np.int64)  # + 0 maps both zeros to one
    ordered = raw ^ ((raw >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    packed = (ordered << 32) | (0xFFFFFFFF - np.arange(size, dtype=np.int64))  # distinct, so any sort is stable
    if count < size:
        packed = np.partition(packed, size - count)[size - count :]
    packed.sort()
    return 0xFFFFFFFF - (packed[::-1] & 0xFFFFFFFF)


def masses(weights: F32) -> I64:
    """Convert weights between 0 and 1 to fixed point."""
    return (weights * np.float32(MASS_ONE)).astype(np.int64)


def kept_tokens(scores: F32, top_k: int, top_p: np.float32, min_p: np.float32) -> I64:
    """Return the unordered ids of the tokens that the filters keep. Never empty.

    scores: [vocab] logits over temperature minus their maximum: the highest is 0. top_k keeps the k highest, the lowest
    ids among ties at the boundary; 0 is off. top_p keeps of those the smallest set in descending order whose mass
    reaches top_p of their mass; 1 is off. min_p drops tokens below min_p times the most likely token's probability; 0
    is off.
    """
    size = scores.shape[0]
    if 0 < top_k < size:
        ids = highest(scores, top_k)
        weights = exp32(scores[ids])
        if top_p < 1.0:
            mass = masses(weights)
            kept = _prefix(mass, _target(int(mass.sum()), top_p))
            ids, weights = ids[:kept], weights[:kept]
    elif top_p < 1.0:
        weights = exp32(scores)
        mass = masses(weights)
        target = _target(int(mass.sum()), top_p)
        for count in (min(_FIRST_TRY, size), size):
            ids = highest(scores, count)
            kept = _prefix(mass[ids], target)
            if kept < count:
                break
        ids = ids[:kept]
        weights = weights[ids]
    else:
        ids, weights = np.arange(size, dtype=np.int64), exp32(scores)
    return ids[weights >= min_p] if min_p > 0.0 else ids


def _target(total: int, top_p: np.float32) -> int:
    """Return the mass to reach, in fixed point: at least 1, so that top_p of 0 keeps the most likely token."""
    return max(1, math.ceil(float(top_p) * float(total)))


def _prefix(mass: I64, target: int) -> int:
    """Return how many of `mass`, descending, are needed to reach `target`."""
    before = np.cumsum(mass) - mass
    return int(np.count_nonzero(before < target))


def bits(words: I32, size: int) -> NDArray[np.bool_]:
    """Return the first `size` bits of a mask: bit v % 32 of word v // 32. [size]"""
    spread = (words[:, None] >> np.arange(32, dtype=np.int32)) & 1
    return spread.reshape(-1)[:size].astype(np.bool_)
