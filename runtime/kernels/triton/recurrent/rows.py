"""Device functions of all recurrent mixers: which rows a kernel computes, their state slots, and a token's step.

A kernel reads and writes a row's state in place, in the row's slot, once a launch. Masked rows, padding and rows of
other kernels are neither read nor written. A row whose first query token is at position 0 begins in this launch and
reads zeros, so the host never zeroes a slot. A row that begins behind a cached prefix reads a snapshot, which is
another slot. A row that reaches a boundary also writes its state to a snapshot.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class StateRows(NamedTuple):
    """A batch's rows and their state slots, as `ForwardBatch` has them. Without snapshots `read_from`, `copied_to` and
    `copied_after` are not read, and without room for drafts the last two are not."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    read_from: torch.Tensor | None
    copied_to: torch.Tensor | None
    copied_after: torch.Tensor | None = None
    replayed: torch.Tensor | None = None


@triton.jit
def row_of(row, rows, SNAPSHOTS: tl.constexpr):
    """A row's first query token, how many it has, its state slot, the slot that it goes on from, the one in which its
    state is left too, below 0 if there is none, whether the row is live, and whether it goes on at all or begins with
    zeros. Of a row that is not live the slots are 0, 0 and -1, and it does not go on."""
    start = tl.load(rows.query_start_loc + row)
    count = tl.load(rows.query_start_loc + row + 1) - start
    live = (tl.load(rows.seq_lens + row) > 0) & (count > 0)
    slot = tl.load(rows.slots + row, mask=live, other=0).to(tl.int64)
    source = slot
    copy = -1 + 0 * slot
    if SNAPSHOTS:
        source = tl.load(rows.read_from + row, mask=live, other=0).to(tl.int64)
        copy = tl.load(rows.copied_to + row, mask=live, other=-1).to(tl.int64)
    goes_on = tl.load(rows.positions + start, mask=live, other=0) > 0
    return start, count, slot, source, copy, live, goes_on


@triton.jit
def leave_state(at, slot, copy, value, mask, SIZE: tl.constexpr, SNAPSHOTS: tl.constexpr):
    """Store numbers of a row's state in its slot, and in the slot `copy` too, unless that is below 0. at: in the first
    slot. SIZE: numbers of a slot."""
    tl.store(at + slot * SIZE, value, mask=mask)
    if SNAPSHOTS:
        tl.store(at + copy * SIZE, value, mask=mask & (copy >= 0))


@triton.jit
def step_of(raw, bias, low, high):
    """Return the step size (dt) of a Mamba-2 head from the first product and the bias."""
    dt = softplus(raw + bias)
    return tl.minimum(tl.maximum(dt, low, tl.PropagateNan.ALL), high, tl.PropagateNan.ALL)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), which no x overflows. Where exp(x) is small, 1 + exp(x) has lost its last bits: what it was
    rounded by is put right by the quotient.

    Source: Kahan's log1p, in Higham, "Accuracy and Stability of Numerical Algorithms", second edition, section 1.14.
    """
    small = tl.exp(-tl.abs(x))
    above = 1.0 + small
    lost = above == 1.0
    log = tl.where(lost, small, tl.log(above) * (small / tl.where(lost, 1.0, above - 1.0)))
    return tl.maximum(x, 0.0) + log
