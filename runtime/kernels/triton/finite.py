"""The end of F: whether each row's final hidden states are finite, into the mapped result ring."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from runtime.forward_batch import ForwardBatch

_TILE: Final = 4096


@triton.jit
def _finite_kernel(
    counter,
    hidden,
    query_start_loc,
    seq_lens,
    flags,
    HIDDEN: tl.constexpr,
    SLOTS: tl.constexpr,
    RING_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a row, over all its query tokens."""
    row = tl.program_id(0)
    bad = tl.zeros([TILE], tl.int32)
    if tl.load(seq_lens + row) > 0:
        end = tl.load(query_start_loc + row + 1).to(tl.int64) * HIDDEN
        for first in range(tl.load(query_start_loc + row).to(tl.int64) * HIDDEN, end, TILE):
            i = first + tl.arange(0, TILE)
            x = tl.load(hidden + i, mask=i < end, other=0.0).to(tl.float32)
            bad |= ((tl.abs(x) < float("inf")) == 0).to(tl.int32)  # a NaN is not below it
    at = (tl.load(counter) % SLOTS) * RING_ROWS + row
    tl.store(flags + at, (tl.max(bad, 0) == 0).to(tl.int8), mask=row < RING_ROWS)


def publish_finite(counter: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch, flags: torch.Tensor) -> None:
    """1 for each row of `batch` whose `hidden`, [T, hidden] contiguous, holds no NaN and no infinity; masked rows too.

    counter: int64 [1], the running launch, whose plan was taken. flags: int8 [slots, rows], mapped.
    """
    _finite_kernel[(batch.num_rows,)](
        counter,
        hidden,
        batch.query_start_loc,
        batch.seq_lens,
        flags,
        HIDDEN=hidden.shape[1],
        SLOTS=flags.shape[0],
        RING_ROWS=flags.shape[1],
        TILE=_TILE,
        num_warps=8,
    )
