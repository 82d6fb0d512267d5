"""What recurrent mixers of the reference share: which rows go on with which states, and a convolution over tokens.

A recurrence is computed token by token, those of different rows side by side. So a row's state is the same bits however
its tokens are cut into launches, and whoever is in them. What is done to many tokens at once is elementwise, or a sum
over an axis of one length whose numbers lie one behind the other, in NumPy, whose order hangs on that length alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.kernels.forward_batch import ForwardBatch

# Floats are float32. n tokens of m live rows.


@dataclass(frozen=True, slots=True)
class Runs:
    """The query tokens of a forward's live rows, row by row, rows with more tokens first."""

    state_slots: NDArray[np.intp]  # [m]
    read_from: NDArray[np.intp]  # [m] slots of the states that they go on with
    copied: NDArray[np.intp]  # [c] those of the m whose states are written to another slot too
    copied_to: NDArray[np.intp]  # [c]
    fresh: NDArray[np.bool_]  # [m] rows that begin with this forward
    counts: NDArray[np.intp]  # [m] query tokens, descending
    begins: NDArray[np.intp]  # [m] each row's first place among the n
    tokens: NDArray[np.intp]  # [n] places among the query tokens of the forward

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

    def end(self, state: NDArray[np.float32], mine: NDArray[np.float32]) -> None:
        """Write the rows' states back, and the snapshots of them."""
        state[self.state_slots] = mine
        if self.copied.size:
            state[self.copied_to] = mine[self.copied]


def runs_of(batch: ForwardBatch) -> Runs:
    """Of a batch's live rows. Masked rows have none: nobody reads or writes their states."""
    assert batch.state_slots is not None, "a model that keeps states is given a batch that names no state slots"
    firsts = batch.query_start_loc.numpy().astype(np.intp)
    rows = np.flatnonzero(batch.seq_lens.numpy() > 0)
    rows = rows[np.argsort(-np.diff(firsts)[rows], kind="stable")]
    counts = np.diff(firsts)[rows]
    begins = np.cumsum(counts) - counts
    tokens = np.arange(int(counts.sum())) + np.repeat(firsts[rows] - begins, counts)
    fresh = batch.positions.numpy()[firsts[rows]] == 0
    own = batch.state_slots.numpy()[rows].astype(np.intp)
    read_from, to = own, np.full(rows.size, -1)
    if batch.states_read_from is not None:
        read_from = batch.states_read_from.numpy()[rows].astype(np.intp)
    if batch.states_copied_to is not None:
        to = batch.states_copied_to.numpy()[rows].astype(np.intp)
    copied = np.flatnonzero(to >= 0)
    return Runs(own, read_from, copied, to[copied], fresh, counts, begins, tokens)


@dataclass(frozen=True, slots=True)
class Convolution:
    """Over each row's last tokens, each channel for itself, and SiLU. weight: [window, channels], oldest first."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None  # [channels]

    def apply(self, runs: Runs, x: NDArray[np.float32], state: NDArray[np.float32]) -> NDArray[np.float32]:
        """x: [n, channels]. state: [state slots, window - 1, channels], inputs that are still seen, oldest first;
        becomes what the next forward needs. Returns [n, channels].

        Each sum begins with the oldest token and ends with the bias.
        """
        window, channels = self.weight.shape
        kept = window - 1
        before = runs.begin(state)
        # Rows one behind the other, each with what it kept in front of it.
        shifts = kept * (1 + np.arange(runs.counts.size))
        places = np.arange(len(x)) + np.repeat(shifts, runs.counts)
        row_begins = runs.begins + shifts - kept
        seen = np.empty((len(x) + kept * runs.counts.size, channels), np.float32)
        seen[(row_begins[:, None] + np.arange(kept)).ravel()] = before.reshape(-1, channels)
        seen[places] = x
        total = seen[places - kept] * self.weight[0]
        for tap in range(1, window):
            total += seen[places - kept + tap] * self.weight[tap]
        if self.bias is not None:
            total += self.bias
        ends = row_begins + runs.counts
        runs.end(state, seen[ends[:, None] + np.arange(kept)])
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
