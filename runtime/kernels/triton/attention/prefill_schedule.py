"""How attention of a launch with prompt chunks is cut into items, on the device and once a launch.

An item is a tile of one row's query tokens, or a part of the tokens that such a tile sees. Attention then runs on a
fixed number of programs that take one item after the other, so that neither its grid nor a captured graph hangs on how
the launch's tokens are shared out among rows or on how long the rows are. How a row is cut hangs on itself, on the plan
and on the launch's shape alone, and so do its bits.
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

RECORD: Final = 4  # numbers of an item, so that each begins at 16 bytes
_RECORD = tl.constexpr(RECORD)
SPLIT_LAUNCH: Final = 512  # query tokens of a launch in which rows of any number of them may be cut into parts
_ROWS: Final = 512  # rows of a launch, at most, in a service
_TILE: Final = 128  # items that a program writes at a time


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """Items of a launch, and where their parts are left. H query heads of D numbers."""

    items: torch.Tensor  # int32 [most items, RECORD] row, tile of its query tokens, part, parts of that tile
    total: torch.Tensor  # int32 [1] items
    partial: torch.Tensor  # float32 [slots, plan.parts, H, D]; without elements where no row is cut into parts
    top: torch.Tensor  # float32 [slots, plan.parts, H]
    mass: torch.Tensor  # float32 [slots, plan.parts, H]
    split_tokens: int  # rows of more query tokens are not cut into parts; of 1, a slot is a row, else a query token


@triton.jit
def _items_of(count, length, TOKENS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, PARTS: tl.constexpr,
              PART_KEYS: tl.constexpr, HEADS: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    """Tiles of rows with so many query tokens, none of masked rows, and into how many parts what a tile sees is cut: as
    many as keep the programs busy with this row alone, of PART_KEYS tokens or more each."""
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
    """One program a row. Its last tile sees the most tokens, and comes first."""
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
    """The plan, without parts where none may be cut (exact), or the launch has query tokens enough to keep all programs
    busy. A form of the kernel that could leave parts takes 5 % longer."""
    return replace(plan, parts=1) if exact or batch.num_tokens > SPLIT_LAUNCH else plan


def rows_looked_at(rows: int) -> int:
    """How many rows a program looks at to find its own, of a launch of so many: a power of two, and the same for any
    launch of a service, so that no number of rows is met for the first time while it serves."""
    return max(int(triton.next_power_of_2(rows)), _ROWS)


def cut_chunks(batch: ForwardBatch, shape: AttentionShape, plan: ChunkPlan) -> ChunkWork:
    """The items of `batch`, for every layer whose attention has this shape and plan. Enqueues one kernel."""
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
