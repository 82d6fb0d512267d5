"""The beginning of F in a decode launch: embeds tokens and splits attention into items.

Attention runs on a fixed number of programs. Their items are computed on the device from this launch's lengths, so a
captured graph serves every context. A row's bits depend on its length alone: its parts are summed in groups, and the
groups' sums in order. An item has the fewest parts with which all items of the launch run at a time, at most a group:
a lone row keeps the GPU busy, and many rows of different lengths balance the programs.

In a mixed launch only rows with one query token are split; the others are prompt chunks for `chunk_attention`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.ops.norms import exact_square
from runahead.runtime.rounding import ceil_div

MAX_PARTS: Final = 32  # of a row and a KV head
_MAX_PARTS = tl.constexpr(MAX_PARTS)
RECORD: Final = 8  # int32 words of an item, for 32-byte alignment
_RECORD = tl.constexpr(RECORD)
TOTAL: Final = 4  # int32 words of a window's total, for 16-byte alignment, which Triton specializes for
_TOTAL = tl.constexpr(TOTAL)
_ROWS_OF_A_PROGRAM: Final = 16  # that it splits into items
_ROWS_OF_MIXED: Final = 512  # of a mixed launch: up to so many have one compiled form


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A split of decode attention. tile: tokens of a KV tile. group: parts whose sum is added to other groups'; a part
    is a tile, or more of them if a row would have over MAX_PARTS parts. programs, warps: of the launch, and of one
    program. stages: of its software pipeline. early: request an item's first tiles before its query token. room: items
    of a KV head that run at a time, the same for all launches of a model; an item has the fewest parts with which there
    are no more, or is a group, with the same bits.
    """

    tile: int
    group: int
    programs: int
    warps: int
    stages: int
    early: bool
    room: int = 0

    def spreads(self, rows: int) -> bool:
        """Return whether an item may be some of a group's parts in a launch of so many rows."""
        return bool(triton.next_power_of_2(rows) <= self.room)

    def parts(self, context_length: int) -> int:
        """Return the most parts of a row and a KV head."""
        return min(MAX_PARTS, ceil_div(context_length, self.tile))

    def sums(self, rows: int, context_length: int) -> int:
        """Return the most sums that the items of a launch of at most so many rows leave for one KV head: of groups, or
        of parts where all items run at a time."""
        parts = self.parts(context_length)
        return max(rows * ceil_div(parts, self.group), min(rows * parts, (self.group - 1) * self.room))


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Items of R rows, for each of the model's W windows. An item's data are in one record, so that one load suffices
    to address keys and values.
    """

    items: torch.Tensor  # int32 [W, R * MAX_PARTS, RECORD], see `_cut`; records past the total are undefined
    total: torch.Tensor  # int32 [W, TOTAL] number of items, parts of an item, then padding


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _begin_kernel(
    token_ids, table, gamma, residual, scaled, squares, seq_lens, query_start_loc, windows, items, total, chunk_lens,
    num_tokens, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    MINE: tl.constexpr, GROUP: tl.constexpr, ROOM: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Embed the tokens, one in each of the first num_tokens programs, and split attention in the next programs, several
    for each window."""
    program = tl.program_id(0)
    if program < num_tokens:
        i = tl.arange(0, BLOCK)
        inside = i < WIDTH
        at = program.to(tl.int64) * WIDTH + i
        found = tl.load(table + tl.load(token_ids + program) * WIDTH + i, mask=inside, other=0.0)
        if SCALE != 1.0:
            found = (found.to(tl.float32) * SCALE).to(table.dtype.element_ty)
        tl.store(residual + at, found, mask=inside)
        if gamma is not None:
            value = found.to(tl.float32)
            weight = tl.load(gamma + i, mask=inside, other=0.0).to(tl.float32)
            tl.store(scaled + at, (value * weight).to(scaled.dtype.element_ty), mask=inside)
            tl.store(squares + program, tl.sum(exact_square(found), 0))
    else:
        _cut(
            seq_lens, query_start_loc, windows, items, total, chunk_lens, num_rows, program - num_tokens, ROWS, MINE,
            TILE, GROUP, ROOM,
        )  # fmt: skip


@triton.jit
def _parts_of(r, window, seq_lens, query_start_loc, num_rows, TILE: tl.constexpr):
    """Return rows' lengths, the tiles before the visible ones, the visible tiles without the query token, a part's
    tiles and the number of parts. query_start_loc: no tiles and parts for rows with another number of query tokens than
    one.
    """
    length = tl.load(seq_lens + r, mask=r < num_rows, other=0)
    decodes = r < num_rows
    if query_start_loc is not None:
        next_row = tl.load(query_start_loc + 1 + r, mask=r < num_rows, other=0)
        queries = next_row - tl.load(query_start_loc + r, mask=r < num_rows, other=0)
        decodes = decodes & (queries == 1)
    hidden = tl.where(window > 0, tl.maximum(length - window, 0) // TILE, 0)
    tiles = (tl.maximum(length - 1, 0) + TILE - 1) // TILE - hidden
    each = tl.maximum((tiles + _MAX_PARTS - 1) // _MAX_PARTS, 1)
    parts = tl.maximum((tiles + each - 1) // each, 1)  # a masked row has one too, which writes zeros
    return length, hidden, tl.where(decodes, tiles, 0), each, tl.where(decodes, parts, 0)


@triton.jit
def _cut(
    seq_lens, query_start_loc, windows, items, total, chunk_lens, num_rows, program, ROWS: tl.constexpr,
    MINE: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Write the items of MINE rows for one window: row, first token, end without the query token, the index of the
    row's first sum among all sums, their number, a part's tiles, the row's length, and the index of the item's first
    sum. An item that is a whole group leaves one sum, another item one for each part. chunk_lens: gets the lengths of
    rows without items.

    The longest items come first, so that programs end at about the same time: full items by row, then
    the others by length.
    """
    PROGRAMS: tl.constexpr = ROWS // MINE
    which = program // PROGRAMS
    window = tl.load(windows + which)
    r = tl.arange(0, ROWS)
    _, _, all_tiles, all_each, all_parts = _parts_of(r, window, seq_lens, query_start_loc, num_rows, TILE)
    together = GROUP
    if ROOM > 0:  # the fewest parts of an item with which the launch has at most ROOM items
        n = tl.arange(0, _MAX_PARTS) + 1
        item_counts = tl.sum((all_parts[:, None] + n[None, :] - 1) // n[None, :], 0)
        together = tl.min(tl.where((item_counts <= ROOM) & (n < GROUP), n, GROUP), 0)
    counts, fulls = (all_parts + together - 1) // together, all_tiles // (all_each * together)
    rests = all_tiles - fulls * (all_each * together)  # tiles of the last item if it is not full
    mine = program % PROGRAMS * MINE + tl.arange(0, MINE)
    length, hidden, tiles, each, parts = _parts_of(mine, window, seq_lens, query_start_loc, num_rows, TILE)
    of_item = each * together
    count, full = (parts + together - 1) // together, tiles // of_item
    rest = tiles - full * of_item
    if chunk_lens is not None:
        if which == 0:
            tl.store(chunk_lens + mine, tl.where(count > 0, 0, length), mask=mine < num_rows)
    earlier = r[None, :] < mine[:, None]
    in_parts = together < GROUP
    before = tl.sum(tl.where(earlier, tl.where(in_parts, all_parts, counts)[None, :], 0), 1)
    sums = tl.where(in_parts, parts, count)
    full_before = tl.sum(tl.where(earlier, fulls[None, :], 0), 1)
    longer_rest = (rests[None, :] > rest[:, None]) | ((rests[None, :] == rest[:, None]) & earlier)
    rests_before = tl.sum(tl.where(longer_rest, counts[None, :] - fulls[None, :], 0), 1)
    p = tl.arange(0, _MAX_PARTS)[None, :]
    ok = p < count[:, None]
    first = (hidden[:, None] + p * of_item[:, None]) * TILE
    end = tl.minimum(first + of_item[:, None] * TILE, tl.maximum(length - 1, 0)[:, None])
    nth = tl.where(p < full[:, None], full_before[:, None] + p, (tl.sum(fulls, 0) + rests_before)[:, None])
    at = items + (which * num_rows * _MAX_PARTS + nth) * _RECORD
    tl.store(at, mine[:, None] + p * 0, mask=ok)
    tl.store(at + 1, first, mask=ok)
    tl.store(at + 2, end, mask=ok)
    tl.store(at + 3, before[:, None] + p * 0, mask=ok)
    tl.store(at + 4, sums[:, None] + p * 0, mask=ok)
    tl.store(at + 5, each[:, None] + p * 0, mask=ok)
    tl.store(at + 6, length[:, None] + p * 0, mask=ok)
    tl.store(at + 7, before[:, None] + p * tl.where(in_parts, together, 1), mask=ok)
    if program % PROGRAMS == 0:
        tl.store(total + which * _TOTAL, tl.sum(counts, 0))
        tl.store(total + which * _TOTAL + 1, together)


def begin_decode(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    residual: torch.Tensor,
    seq_lens: torch.Tensor,
    windows: torch.Tensor,
    plan: AttentionPlan,
    *,
    scaled: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    gamma: torch.Tensor | None = None,
    scale: float = 1.0,
    query_start_loc: torch.Tensor | None = None,
    chunk_lens: torch.Tensor | None = None,
) -> AttentionWork:
    """Embed query tokens into `residual`, [T or more, hidden], and split attention over rows of these lengths.

    token_ids: int64 [T], in the vocabulary; T of 0 embeds nothing. table: contiguous [vocab, hidden].
    seq_lens: int32 [R]. windows: int32 [W] visible tokens, 0: all; W may be 0. scaled, squares, gamma, all or none:
    outputs residual * gamma, [hidden], and sums of its squares, float64 [1, T or more]. scale: multiplies embeddings.
    chunk_lens: int32 [R], for mixed launches with query_start_loc, int32 [R + 1], and a window: output, the lengths of
    rows with another number of query tokens than one, which are not split, and 0 for others.
    """
    ragged = chunk_lens is not None
    assert not ragged or (query_start_loc is not None and windows.shape[0])
    tokens, rows, width = token_ids.shape[0], seq_lens.shape[0], table.shape[1]
    all_rows, kinds, device = triton.next_power_of_2(rows), windows.shape[0], seq_lens.device
    if ragged:
        all_rows = max(all_rows, _ROWS_OF_MIXED)
    mine = min(all_rows, _ROWS_OF_A_PROGRAM)
    items = torch.empty((kinds, rows * MAX_PARTS, RECORD), dtype=torch.int32, device=device)
    total = torch.empty((kinds, TOTAL), dtype=torch.int32, device=device)
    _begin_kernel[(tokens + kinds * (all_rows // mine),)](
        token_ids,
        table,
        gamma,
        residual,
        scaled,
        squares,
        seq_lens,
        query_start_loc if ragged else None,
        windows,
        items,
        total,
        chunk_lens,
        tokens,
        rows,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=all_rows,
        MINE=mine,
        TILE=plan.tile,
        GROUP=plan.group,
        ROOM=plan.room if plan.spreads(rows) else 0,
        SCALE=scale,
        num_warps=4,
    )
    return AttentionWork(items, total)
