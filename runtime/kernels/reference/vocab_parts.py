"""The plain form's sampler for ranks that have a part of the vocabulary each: the bits of `sampling.sample_rows`.

Each rank finds its highest logit, then the ranks agree on the row's. Rows that draw go on: each rank finds
the highest score with noise of its part, and the ranks agree on the highest. Ties go to the lowest id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.reference.sampling import (
    F32,
    I64,
    Sampled,
    are_drawn,
    best_of,
    scores_drawn,
    wide_candidates,
)
from runahead.runtime.kernels.row_state import RowState

Collect = Callable[[NDArray[np.int32]], NDArray[np.int32]]  # of each rank, [n, words], to all ranks', [ranks, n, words]
_NO_TOKEN: Final = np.iinfo(np.int32).max


def sample_part(logits: F32, state: RowState, slots: I64, first: int, collect: Collect) -> Sampled:
    """Return what `sample_rows` returns of the whole vocabulary in the plain form, on every rank.

    logits: [n, width], row i belonging to slots[i], [n], of the ids from `first` on; the width may be 0. collect: makes
    the same calls on every rank.
    """
    count, width = logits.shape
    high, token, finite = np.full(count, -np.inf, np.float32), np.full(count, _NO_TOKEN, np.int32), np.ones(count, bool)
    if width:
        high, token = logits.max(axis=1), (first + logits.argmax(axis=1)).astype(np.int32)
        finite = np.isfinite(high) & np.isfinite(logits.min(axis=1))
    found = collect(np.stack((high.view(np.int32), token, finite.astype(np.int32)), axis=1))
    alive = state.alive.numpy()[slots]
    finite = found[:, :, 2].all(axis=0) | ~alive
    live = finite & alive
    high, tokens = _highest(found[:, live, 0].view(np.float32), found[:, live, 1])
    chosen = np.zeros(count, np.int64)
    chosen[live] = tokens
    draws = are_drawn(state, slots[live])
    if draws.any():
        rows = np.flatnonzero(live)[draws]
        chosen[rows] = _drawn(logits, rows, high[draws], state, slots, first, collect)
    return Sampled(torch.from_numpy(chosen), torch.from_numpy(finite))


def _drawn(logits: F32, rows: I64, high: F32, state: RowState, slots: I64, first: int, collect: Collect) -> I64:
    """Tokens of these rows, [r], ascending, all of which draw. high: of each row, [r]."""
    best, noisy = np.full(rows.size, _NO_TOKEN, np.int64), np.full(rows.size, -np.inf, np.float32)
    if logits.shape[1]:
        seed, position = state.seed.numpy()[slots], state.seq_len.numpy()[slots].astype(np.int64)
        with np.errstate(over="ignore"):  # a score may leave float32: it is never drawn
            scores = scores_drawn(logits[rows], high, state, slots[rows])
            best, noisy = best_of(
                [*wide_candidates(scores, np.arange(rows.size), rows, seed, position, first)], seed, position
            )
    found = collect(np.stack((noisy.view(np.int32), best.astype(np.int32)), axis=1))
    return _highest(found[:, :, 0].view(np.float32), found[:, :, 1])[1]


def _highest(values: F32, tokens: NDArray[np.int32]) -> tuple[F32, I64]:
    """The highest value of each row and its token, the lowest among equals. [ranks, n], [ranks, n]"""
    highest: F32 = values.max(axis=0)
    return highest, np.where(values == highest, tokens, _NO_TOKEN).min(axis=0).astype(np.int64)
