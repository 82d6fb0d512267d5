"""Splits prefill attention into items, on the device and once a launch.

An item is a tile of a row's query tokens, or a part of the tokens that the tile sees. A fixed number of programs
processes the items, so neither the grid nor a captured graph depends on how tokens are distributed among rows, or on
rows' lengths. A row's split, and so its bits, depend only on the row, the plan and the launch's shape.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import AttentionShape
from runahead.runtime.kernels.triton.attention.prefill_tuning import ChunkPlan

RECORD: Final = 4  # int32 words of an item, for 16-byte alignment
_RECORD = tl.constexpr(RECORD)
SPLIT_LAUNCH: Final = 512  # query tokens of a launch in which rows with several of them may be split
_ROWS: Final = 512  # of a launch: up to so many have one compiled form
_TILE: Final = 128  # items that a program writes at a time


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """A launch's items and the buffers of their parts, for H query heads of D numbers."""

    items: torch.Tensor  # int32 [most items, RECORD] row, tile of its query tokens, part, number of parts
    total: torch.Tensor  # int32 [1] number of items
    partial: torch.Tensor  # float32 [slots, plan.parts, H, D]; empty if no row is split
    top: torch.Tensor  # float32 [slots, plan.parts, H]
    mass: torch.Tensor  # float32 [slots, plan.parts, H]
    split_tokens: int  # rows with more query tokens are not split; 1: a slot is a row, else a query token


@triton.jit
def _items_of(count, length, TOKENS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, PARTS: tl.constexpr,
              PART_KEYS: tl.constexpr, HEADS: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    """Return a row's number of query tiles (0 if masked) and of parts of each: enough to keep the programs busy with
    this row alone, of at least PART_KEYS tokens.
    """
    tiles = tl.where(length > 0, (count + TOKENS - 1) // TOKENS, 0)
    lines = tl.maximum(tiles * HEADS, 1)
    parts = tl.minimum((PROGRAMS + lines - 1) // lines, (length + PART_KEYS - 1) // PART_KEYS)
    parts = tl.minimum(tl.maximum(parts, 1), PARTS)
    return tiles, tl.where(count <= SPLIT_TOKENS, parts, 1)


@triton.jit(do_not_specialize=["num_rows"])
def _cut_kernel(
    seq_lens, query_start_loc, items, total, num_rows, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, PARTS: tl.constexpr, PART_KEYS: tl.constexpr, HEADS: tl.constexpr,
    PROGRAMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the items, one program a row. The last tile sees the most tokens and comes first."""
    row = tl.program_id(0)
    r = tl.arange(0, ROWS)
    inside = r < num_rows
    count = tl.load(query_start_loc + 1 + r, mask=inside, other=0) - tl.load(query_start_loc + r, mask=inside, other=0)
    length = tl.load(seq_lens + r, mask=inside, other=0)
    tiles, parts = _items_of(count, length, TOKENS, SPLIT_TOKENS, PARTS, PART_KEYS, HEADS, PROGRAMS)
    before = tl.sum(tl.where(r < row, tiles * parts, 0), 0)
    if row == 0:
        tl.store(total, tl.sum(tiles * parts, 0))
    tiles = tl.sum(tl.where(r == row, tiles, 0), 0)
    parts = tl.sum(tl.where(r == row, parts, 0), 0)
    for first in range(0, tiles * parts, TILE):
        i = first + tl.arange(0, TILE)
        ok = i < tiles * parts
        at = items + (before + i) * _RECORD
        tl.store(at, row + i * 0, mask=ok)
        tl.store(at + 1, tiles - 1 - i // parts, mask=ok)
        tl.store(at + 2, i % parts, mask=ok)
        tl.store(at + 3, parts + i * 0, mask=ok)


def plan_of_launch(plan: ChunkPlan, batch: ForwardBatch, *, exact: bool = False) -> ChunkPlan:
    """Return the plan, without parts if splitting is not allowed (exact) or the launch has enough query tokens for all
    programs. A kernel that may write parts is 5 % slower.
    """
    return replace(plan, parts=1) if exact or batch.num_tokens > SPLIT_LAUNCH else plan


def rows_looked_at(rows: int) -> int:
    """Return how many rows a program scans to find its own: a power of two, the same for any launch of up to 512
    rows; warm-up compiles that form, and the one of more rows.
    """
    return max(int(triton.next_power_of_2(rows)), _ROWS)


def cut_chunks(batch: ForwardBatch, shape: AttentionShape, plan: ChunkPlan) -> ChunkWork:
    """Return the items of `batch`, for every attention layer of this shape and plan. Enqueues one kernel."""
    device, rows = batch.seq_lens.device, batch.num_rows
    tokens = plan.tokens(shape.heads // shape.kv_heads)
    split_tokens = SPLIT_LAUNCH if batch.num_tokens <= SPLIT_LAUNCH else 1
    slots = 0 if plan.parts == 1 else batch.num_tokens if split_tokens > 1 else rows
    most = (batch.num_tokens // tokens + rows) * plan.parts
    work = ChunkWork(
        items=torch.empty((most, RECORD), dtype=torch.int32, device=device),
        total=torch.empty(1, dtype=torch.int32, device=device),
        partial=torch.empty((slots, plan.parts, shape.heads, shape.head_dim), dtype=torch.float32, device=device),
        top=torch.empty((slots, plan.parts, shape.heads), dtype=torch.float32, device=device),
        mass=torch.empty((slots, plan.parts, shape.heads), dtype=torch.float32, device=device),
        split_tokens=split_tokens,
    )
    _cut_kernel[(rows,)](
        batch.seq_lens,
        batch.query_start_loc,
        work.items,
        work.total,
        rows,
        ROWS=rows_looked_at(rows),
        TOKENS=tokens,
        SPLIT_TOKENS=split_tokens,
        PARTS=plan.parts,
        PART_KEYS=plan.part_keys,
        HEADS=shape.kv_heads,
        PROGRAMS=plan.programs,
        TILE=_TILE,
        num_warps=4,
    )
    return work
