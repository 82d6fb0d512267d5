"""Shared code of the reference's recurrent mixers: rows, their states, and a convolution over tokens.

A recurrence is computed token by token, with different rows side by side, so a row's state has the same bits for any
split into launches and any neighbors. Operations on many tokens at once are elementwise, or NumPy sums over a
contiguous axis of fixed length, whose order depends on that length alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import GatedDelta, Mamba2
from runahead.runtime.kernels.reference.linear import Products
from runahead.runtime.kernels.reference.ops import RmsNorm

# Floats are float32. n tokens of m live rows, replayed tokens of earlier runs included. A tensor and an array of one
# name share memory.


@dataclass(frozen=True, slots=True)
class RecurrentBuffers:
    """Buffers of recurrent mixers of one shape."""

    projected: torch.Tensor  # [T, inner + inputs of the recurrence]
    y: NDArray[np.float32]  # [T, inner]
    gated: NDArray[np.float32]  # [T, inner]
    norm: RmsNorm  # in place, over each group's part of `gated` (Mamba-2) or each head of `y` (gated delta net)
    gated_parts: tuple[torch.Tensor, ...]

    @staticmethod
    def make(tokens: int, mixer: Mamba2 | GatedDelta, products: Products) -> RecurrentBuffers:
        inner = mixer.shape.inner
        y, gated = np.zeros((tokens, inner), np.float32), torch.zeros((tokens, inner))
        if isinstance(mixer, Mamba2):
            normed = gated.numpy().reshape(tokens, mixer.shape.groups, -1)
        else:
            normed = y.reshape(tokens, mixer.shape.value_heads, -1)
        return RecurrentBuffers(
            projected=torch.zeros((tokens, inner + mixer.keeps.inputs)),
            y=y,
            gated=gated.numpy(),
            norm=RmsNorm.of(normed, normed),
            gated_parts=products.cut(gated),
        )


@dataclass(frozen=True, slots=True)
class Writes:
    """States that a forward writes. after: [w] number of the row's tokens, replayed ones included, that each state
    covers. rows: [w] indexes among the m rows. slots: [w] destinations.
    """

    after: NDArray[np.intp]
    rows: NDArray[np.intp]
    slots: NDArray[np.intp]

    def by_step(self) -> dict[int, tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """Return rows and slots of the states after each row's token number `step`, from 0."""
        return {
            after - 1: (self.rows[self.after == after], self.slots[self.after == after])
            for after in np.unique(self.after).tolist()
        }


@dataclass(frozen=True, slots=True)
class RowTokens:
    """The tokens of a forward's live rows, row by row, longest rows first: of each row the replayed tokens of its
    earlier run, then its query tokens. n tokens are q query tokens and p replayed ones.
    """

    read_from: NDArray[np.intp]  # [m] slots of the states that the rows go on with
    fresh: NDArray[np.bool_]  # [m] rows that begin with this forward
    counts: NDArray[np.intp]  # [m] tokens, descending
    begins: NDArray[np.intp]  # [m] index of each row's first token among the n
    tokens: NDArray[np.intp]  # [q] indexes among the query tokens of the forward
    own: NDArray[np.intp]  # [q] their indexes among the n
    replayed: NDArray[np.intp]  # [p] indexes among the n
    replayed_from: tuple[NDArray[np.intp], NDArray[np.intp]]  # [p], [p] state slots, and indexes in their runs
    drafts: NDArray[np.intp]  # [d] query tokens whose states are not written: the next forward may replay them
    drafts_to: tuple[NDArray[np.intp], NDArray[np.intp]]  # [d], [d] as replayed_from
    writes: Writes

    def gather(self, mine: NDArray[np.float32], kept: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the recurrence's inputs of all n tokens, and save the inputs of drafts. mine: [q, width], inputs of
        the query tokens. kept: [state slots, K, width], inputs of earlier runs, overwritten.
        """
        found = mine
        if self.replayed.size:
            found = np.empty((mine.shape[0] + self.replayed.size, mine.shape[1]), np.float32)
            found[self.own] = mine
            found[self.replayed] = kept[self.replayed_from]
        if self.drafts.size:
            kept[self.drafts_to] = mine[self.drafts]
        return found

    def steps(self) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Yield one token of each row that has another: the number of rows, which come first, and their tokens' indexes
        among the n.
        """
        if not self.counts.size:
            return
        for step in range(int(self.counts[0])):
            rows = int(np.count_nonzero(self.counts > step))
            yield rows, self.begins[:rows] + step

    def begin(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """Copy these rows' states, zeros for rows that begin. state: [state slots, ...]. Returns [m, ...]."""
        mine: NDArray[np.float32] = state[self.read_from]
        mine[self.fresh] = 0.0
        return mine


def row_tokens_of(batch: ForwardBatch) -> RowTokens:
    """Make the tokens of a batch's live rows. Masked rows have none: their states are neither read nor written."""
    assert batch.state_slots is not None, "a model that keeps states is given a batch that names no state slots"
    firsts = batch.query_start_loc.numpy().astype(np.intp)
    queries = np.diff(firsts)
    before, certain = _given(batch.replayed, np.zeros_like(queries)), _given(batch.certain, queries)
    copied_after = _given(batch.copied_after, before + certain)
    rows = np.flatnonzero(batch.seq_lens.numpy() > 0)
    rows = rows[np.argsort(-(queries + before)[rows], kind="stable")]
    queries, before, certain = queries[rows], before[rows], certain[rows]
    counts = queries + before
    begins = np.cumsum(counts) - counts
    # For each query token its row among the m and its index in the row; then the same for replayed tokens.
    row, index = _ragged(queries)
    again, index_again = _ragged(before)
    is_draft = index >= certain[row]
    slots = batch.state_slots.numpy()[rows].astype(np.intp)
    read_from = _given(batch.states_read_from, batch.state_slots.numpy())[rows]
    copied_to = _given(batch.states_copied_to, np.full(firsts.size - 1, -1))[rows]
    copied = np.flatnonzero(copied_to >= 0)
    everybody = np.arange(rows.size)
    return RowTokens(
        read_from=read_from,
        fresh=batch.positions.numpy()[firsts[rows]] == 0,
        counts=counts,
        begins=begins,
        tokens=firsts[rows][row] + index,
        own=(begins + before)[row] + index,
        replayed=begins[again] + index_again,
        replayed_from=(slots[again], index_again),
        drafts=np.flatnonzero(is_draft),
        drafts_to=(slots[row[is_draft]], (index - certain[row])[is_draft]),
        writes=Writes(
            np.concatenate([before + certain, copied_after[rows][copied]]),
            np.concatenate([everybody, copied]),
            np.concatenate([slots, copied_to[copied]]),
        ),
    )


def _given(tensor: torch.Tensor | None, otherwise: NDArray[np.number[Any]]) -> NDArray[np.intp]:
    return (otherwise if tensor is None else tensor.numpy()).astype(np.intp)


def _ragged(counts: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return each token's row and its index there, for consecutive rows of these lengths."""
    row = np.repeat(np.arange(counts.size), counts)
    return row, np.arange(row.size) - (np.cumsum(counts) - counts)[row]


@dataclass(frozen=True, slots=True)
class Convolution:
    """A depthwise convolution over each row's last tokens, with SiLU. weight: [window, channels], oldest first."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None  # [channels]

    def apply(self, runs: RowTokens, x: NDArray[np.float32], state: NDArray[np.float32]) -> NDArray[np.float32]:
        """Convolve x, [n, channels]. state: [state slots, window - 1, channels], earlier inputs, oldest first; updated
        for the next forward. Returns [n, channels].

        Each sum begins with the oldest token and ends with the bias.
        """
        window, channels = self.weight.shape
        kept = window - 1
        before = runs.begin(state)
        # Consecutive rows, each preceded by its saved inputs.
        shifts = kept * (1 + np.arange(runs.counts.size))
        indexes = np.arange(len(x)) + np.repeat(shifts, runs.counts)
        row_begins = runs.begins + shifts - kept
        seen = np.empty((len(x) + kept * runs.counts.size, channels), np.float32)
        seen[(row_begins[:, None] + np.arange(kept)).ravel()] = before.reshape(-1, channels)
        seen[indexes] = x
        total = seen[indexes - kept] * self.weight[0]
        for tap in range(1, window):
            total += seen[indexes - kept + tap] * self.weight[tap]
        if self.bias is not None:
            total += self.bias
        writes = runs.writes
        state[writes.slots] = seen[(row_begins[writes.rows] + writes.after)[:, None] + np.arange(kept)]
        return silu(total)


def silu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute x / (1 + exp(-x))."""
    below = np.negative(x)
    np.exp(below, out=below)
    np.add(below, np.float32(1.0), out=below)
    return np.divide(x, below, out=below)


def softplus(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute log(1 + exp(x)) without overflow."""
    found: NDArray[np.float32] = np.logaddexp(np.float32(0.0), x)
    return found
