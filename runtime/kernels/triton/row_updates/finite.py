"""The end of F: checks that each row's numbers are finite, and reports it in the mapped result ring."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

FINITE_TILE: Final = 4096


@triton.jit
def finite_kernel(
    counter, hidden, query_start_loc, seq_lens, prompt, flags, SIZES: tl.constexpr, HIDDEN: tl.constexpr,
    PEAKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write 1 for a row whose numbers are all finite, and for a masked row.

    The numbers are the row's part of `hidden`, contiguous [T, HIDDEN], and its logits from `leave_prompt_logprobs` in
    this launch. prompt: `wanted`, and PEAKS peaks of each query token; None: no prompt logits. counter: int64 [1], the
    running launch, whose plan was applied. flags: int8 [launches of the ring, rows], mapped.
    """
    row = tl.program_id(0)
    bad = tl.zeros([TILE], tl.int32)
    if tl.load(seq_lens + row) > 0:
        end = tl.load(query_start_loc + row + 1).to(tl.int64) * HIDDEN
        for first in range(tl.load(query_start_loc + row).to(tl.int64) * HIDDEN, end, TILE):
            i = first + tl.arange(0, TILE)
            x = tl.load(hidden + i, mask=i < end, other=0.0).to(tl.float32)
            bad |= ((tl.abs(x) < float("inf")) == 0).to(tl.int32)  # also true for NaN
        if prompt is not None:
            wanted, peaks = prompt
            end = tl.load(query_start_loc + row + 1).to(tl.int64) * PEAKS
            for first in range(tl.load(query_start_loc + row).to(tl.int64) * PEAKS, end, TILE):
                i = first + tl.arange(0, TILE)
                made = tl.load(wanted + i // PEAKS, mask=i < end, other=0) != 0
                peak = tl.load(peaks + i, mask=made, other=0.0)
                bad |= (peak == float("inf")).to(tl.int32)
    at = (tl.load(counter) % SIZES.SLOTS) * SIZES.RING_ROWS + row
    tl.store(flags + at, (tl.max(bad, 0) == 0).to(tl.int8), mask=row < SIZES.RING_ROWS)
