"""What kernels of recurrent mixers share: whose turn a row is, its state slot, and the step of a token.

A row's state lies in its slot and stays there: who computes a row reads it and writes it in place, once a launch. A row
that is masked, padding, or none of the kernel's is neither read nor written. A row whose first query token is at
position 0 begins in this launch: it reads zeros, whatever its slot holds, and nothing of the host's zeroes a slot. One
that begins behind a cached prefix reads a snapshot, which is another slot, and one that reaches a boundary leaves its
state in a snapshot too.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of(
    row, state_slots, read_from, copied_to, seq_lens, positions, query_start_loc, SNAPSHOTS: tl.constexpr
):  # fmt: skip
    """A row's first query token, how many it has, its state slot, the slot that it goes on from, the one in which its
    state is left too, below 0 if there is none, whether the row is live, and whether it goes on at all or begins with
    zeros. Of a row that is not live the slots are 0, 0 and -1, and it does not go on."""
    start = tl.load(query_start_loc + row)
    count = tl.load(query_start_loc + row + 1) - start
    live = (tl.load(seq_lens + row) > 0) & (count > 0)
    slot = tl.load(state_slots + row, mask=live, other=0).to(tl.int64)
    source = slot
    copy = -1 + 0 * slot
    if SNAPSHOTS:
        source = tl.load(read_from + row, mask=live, other=0).to(tl.int64)
        copy = tl.load(copied_to + row, mask=live, other=-1).to(tl.int64)
    goes_on = tl.load(positions + start, mask=live, other=0) > 0
    return start, count, slot, source, copy, live, goes_on


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
