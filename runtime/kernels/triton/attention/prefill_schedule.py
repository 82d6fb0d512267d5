"""Splits prefill attention into items, on the device and once a launch.

An item is a tile of a row's query tokens. A fixed number of programs processes the items, so neither the grid nor a
captured graph depends on how tokens are distributed among rows, or on rows' lengths.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import AttentionShape
from runahead.runtime.kernels.triton.attention.prefill_tuning import ChunkPlan

RECORD: Final = 2  # int32 words of an item, for 8-byte alignment
_RECORD = tl.constexpr(RECORD)
_ROWS: Final = 512  # of a launch: up to so many have one compiled form
_TILE: Final = 128  # items that a program writes at a time


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """A launch's items."""

    items: torch.Tensor  # int32 [most items, RECORD] row, tile of its query tokens
    total: torch.Tensor  # int32 [1] number of items


@triton.jit(do_not_specialize=["num_rows"])
def _cut_kernel(
    seq_lens, query_start_loc, items, total, num_rows, ROWS: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr
):
    """Write the items, one program a row; a masked row has none. The last tile sees the most tokens and comes first."""
    row = tl.program_id(0)
    r = tl.arange(0, ROWS)
    inside = r < num_rows
    count = tl.load(query_start_loc + 1 + r, mask=inside, other=0) - tl.load(query_start_loc + r, mask=inside, other=0)
    length = tl.load(seq_lens + r, mask=inside, other=0)
    tiles = tl.where(length > 0, (count + TOKENS - 1) // TOKENS, 0)
    before = tl.sum(tl.where(r < row, tiles, 0), 0)
    if row == 0:
        tl.store(total, tl.sum(tiles, 0))
    tiles = tl.sum(tl.where(r == row, tiles, 0), 0)
    for first in range(0, tiles, TILE):
        i = first + tl.arange(0, TILE)
        at = items + (before + i) * _RECORD
        tl.store(at, row + i * 0, mask=i < tiles)
        tl.store(at + 1, tiles - 1 - i, mask=i < tiles)


@triton.jit
def item_of(turn, items, all_items, HEADS: tl.constexpr):
    """Read a program's item of this `turn`: whether there is one, its row, its tile, and its KV head. Every other turn
    assigns items in reverse, since the longest come first.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    index = turn * programs + tl.where(turn % 2 == 1, programs - 1 - program, program)
    there = index < all_items
    at = items + tl.where(there, index // HEADS, 0) * _RECORD
    return there, tl.load(at), tl.load(at + 1), index % HEADS


@triton.jit
def seen_of(
    there, row, tile, seq_lens, query_start_loc, TOKENS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr
):
    """Return the row's first query token, their number and the preceding tokens; then as positions the end of the
    tile's last KV tile, the item's begin and end, and begin and end of the unmasked range. Begins are multiples of
    KEYS; empty ranges have equal ends.
    """
    first_query = tl.load(query_start_loc + row)
    count = tl.load(query_start_loc + row + 1) - first_query
    seq_len = tl.load(seq_lens + row)
    before = seq_len - count
    first = before + tile * TOKENS
    last = tl.minimum(first + TOKENS, seq_len)
    begin = first * 0
    if WINDOW > 0:
        begin = tl.maximum(first + 1 - WINDOW, 0) // KEYS * KEYS
    end = tl.where(there, tl.maximum(last, begin), begin)
    whole_begin = begin
    if WINDOW > 0:
        hidden = tl.maximum(first + TOKENS - WINDOW, 0)
        whole_begin = tl.minimum(tl.maximum((hidden + KEYS - 1) // KEYS * KEYS, begin), end)
    whole_end = tl.maximum(tl.minimum(tl.maximum(first + 1, 0) // KEYS * KEYS, end), whole_begin)
    return first_query, count, before, last, begin, end, whole_begin, whole_end


def rows_scanned(rows: int) -> int:
    """Return how many rows a program scans to find its own: a power of two, the same for any launch of up to 512
    rows; warm-up compiles that form, and the one of more rows.
    """
    return max(int(triton.next_power_of_2(rows)), _ROWS)


def cut_chunks(batch: ForwardBatch, shape: AttentionShape, plan: ChunkPlan) -> ChunkWork:
    """Return the items of `batch`, for every attention layer of this shape and plan. Enqueues one kernel."""
    device, rows = batch.seq_lens.device, batch.num_rows
    tokens = plan.tokens(shape.heads // shape.kv_heads)
    work = ChunkWork(
        items=torch.empty((batch.num_tokens // tokens + rows, RECORD), dtype=torch.int32, device=device),
        total=torch.empty(1, dtype=torch.int32, device=device),
    )
    _cut_kernel[(rows,)](
        batch.seq_lens,
        batch.query_start_loc,
        work.items,
        work.total,
        rows,
        ROWS=rows_scanned(rows),
        TOKENS=tokens,
        TILE=_TILE,
        num_warps=4,
    )
    return work
