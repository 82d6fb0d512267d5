"""What recurrent mixers of the reference share: which rows go on with which states, and a convolution over tokens.

A recurrence is computed token by token, those of different rows side by side. So a row's state is the same bits however
its tokens are cut into launches, and whoever is in them. What is done to many tokens at once is elementwise, or a sum
over an axis of one length whose numbers lie one behind the other, in NumPy, whose order hangs on that length alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.forward_batch import ForwardBatch

# Floats are float32. n tokens of m live rows, those of the runs before that are replayed among them.


@dataclass(frozen=True, slots=True)
class Writes:
    """States that a forward leaves. after: [w] how many of the row's tokens, those that are replayed included, each one
    is the state behind. rows: [w] among the m. slots: [w] where it is written."""

    after: NDArray[np.intp]
    rows: NDArray[np.intp]
    slots: NDArray[np.intp]

    def by_step(self) -> dict[int, tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """Rows and slots of the states behind token number `step` of their rows, from 0 on."""
        return {
            after - 1: (self.rows[self.after == after], self.slots[self.after == after])
            for after in np.unique(self.after).tolist()
        }


@dataclass(frozen=True, slots=True)
class RowTokens:
    """The tokens of a forward's live rows, row by row, rows with more tokens first: of each row those of the run before
    that are replayed, and then its query tokens. Of the n tokens, q are query tokens and p are replayed."""

    read_from: NDArray[np.intp]  # [m] slots of the states that the rows go on with
    fresh: NDArray[np.bool_]  # [m] rows that begin with this forward
    counts: NDArray[np.intp]  # [m] tokens, descending
    begins: NDArray[np.intp]  # [m] each row's first place among the n
    tokens: NDArray[np.intp]  # [q] places among the query tokens of the forward
    own: NDArray[np.intp]  # [q] their places among the n
    replayed: NDArray[np.intp]  # [p] places among the n
    replayed_from: tuple[NDArray[np.intp], NDArray[np.intp]]  # [p], [p] state slots, and places in their runs
    drafts: NDArray[np.intp]  # [d] those of the q whose states are not written: the next forward may replay them
    drafts_to: tuple[NDArray[np.intp], NDArray[np.intp]]  # [d], [d] as replayed_from
    writes: Writes

    def gather(self, mine: NDArray[np.float32], kept: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the recurrence is given of all n tokens, and the inputs of drafts are kept. mine: [q, width], inputs of
        the query tokens. kept: [state slots, K, width], those of the runs before, which are written over."""
        found = mine
        if self.replayed.size:
            found = np.empty((mine.shape[0] + self.replayed.size, mine.shape[1]), np.float32)
            found[self.own] = mine
            found[self.replayed] = kept[self.replayed_from]
        if self.drafts.size:
            kept[self.drafts_to] = mine[self.drafts]
        return found

    def steps(self) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """One token of each row that has another one: how many rows, the first ones, and the places of their tokens
        among the n."""
        if not self.counts.size:
            return
        for step in range(int(self.counts[0])):
            rows = int(np.count_nonzero(self.counts > step))
            yield rows, self.begins[:rows] + step

    def begin(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """A copy of these rows' states, zeros for those that begin. state: [state slots, ...]. Returns [m, ...]."""
        mine: NDArray[np.float32] = state[self.read_from]
        mine[self.fresh] = 0.0
        return mine


def row_tokens_of(batch: ForwardBatch) -> RowTokens:
    """Of a batch's live rows. Masked rows have none: nobody reads or writes their states."""
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
    # Of each query token its row among the m, and its place in the row; then the same of those that are replayed.
    row, index = _ragged(queries)
    again, place_again = _ragged(before)
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
        replayed=begins[again] + place_again,
        replayed_from=(slots[again], place_again),
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
    """Rows of so many tokens each, one behind the other: of each token its row, and its place there."""
    row = np.repeat(np.arange(counts.size), counts)
    return row, np.arange(row.size) - (np.cumsum(counts) - counts)[row]


@dataclass(frozen=True, slots=True)
class Convolution:
    """Over each row's last tokens, each channel for itself, and SiLU. weight: [window, channels], oldest first."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None  # [channels]

    def apply(self, runs: RowTokens, x: NDArray[np.float32], state: NDArray[np.float32]) -> NDArray[np.float32]:
        """x: [n, channels]. state: [state slots, window - 1, channels], inputs that are still seen, oldest first;
        becomes what the next forward needs. Returns [n, channels].

        Each sum begins with the oldest token and ends with the bias.
        """
        window, channels = self.weight.shape
        kept = window - 1
        before = runs.begin(state)
        # Rows one behind the other, each with what it kept in front of it.
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
    """x / (1 + exp(-x))."""
    below = np.negative(x)
    np.exp(below, out=below)
    np.add(below, np.float32(1.0), out=below)
    return np.divide(x, below, out=below)


def softplus(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """log(1 + exp(x)), which no x overflows."""
    found: NDArray[np.float32] = np.logaddexp(np.float32(0.0), x)
    return found
