"""The beginning of F in a decode launch: embeds tokens and splits attention into items.

Attention runs on a fixed number of programs. Their items are computed on the device from this launch's lengths, so a
captured graph serves every context. A row's bits depend on its length alone: its parts are summed in groups, and the
groups' sums in order. With few rows each part is an item, so that a lone row keeps the GPU busy; with many rows an item
is a group, so that rows of different lengths balance the programs.

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

MAX_PARTS: Final = 32  # most items of a row and a KV head
_MAX_PARTS = tl.constexpr(MAX_PARTS)
RECORD: Final = 8  # int32 words of an item, for 32-byte alignment
_RECORD = tl.constexpr(RECORD)
TOTAL: Final = 4  # int32 words of a window's total, for 16-byte alignment, which Triton specializes for
_TOTAL = tl.constexpr(TOTAL)
_ROWS_OF_A_PROGRAM: Final = 16  # that it splits into items
_ROWS_OF_MIXED: Final = 512  # of a mixed launch: up to so many have one compiled form


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A split of decode attention. tile: tokens of a KV tile. chunk: most tiles of a part, exceeded if a row would have
    over MAX_PARTS parts. programs, warps: of the launch, and of one program. stages: tiles in flight. early: load a
    part's tiles before its turn. group: parts whose sum is added to other groups'. grouped: an item is a group instead
    of a part, with the same bits.
    """

    tile: int
    chunk: int
    programs: int
    warps: int
    stages: int
    early: bool
    group: int = 1
    grouped: bool = False

    def __post_init__(self) -> None:
        assert not (self.early and self.grouped), "an item's first tile is then not that of its first part"

    def parts(self, context_length: int) -> int:
        """Return the most items of a row and a KV head."""
        return min(MAX_PARTS, ceil_div(context_length, self.tile * self.chunk))


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Items of R rows, for each of the model's W windows. An item's data are in one record, so that one load suffices
    to address keys and values.
    """

    items: torch.Tensor  # int32 [W, R * MAX_PARTS, RECORD], see `_cut`; records past the total are undefined
    total: torch.Tensor  # int32 [W, TOTAL] number of items, then padding


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _begin_kernel(
    token_ids, table, gamma, residual, scaled, squares, seq_lens, query_start_loc, windows, items, total, chunk_lens,
    num_tokens, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    MINE: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr, SCALED: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Programs 0 to num_tokens - 1 embed a token each; the next ones split attention, several for each window."""
    program = tl.program_id(0)
    if program < num_tokens:
        _embed(token_ids, table, gamma, residual, scaled, squares, program, WIDTH, BLOCK, SCALED, SCALE)
    else:
        _cut(
            seq_lens, query_start_loc, windows, items, total, chunk_lens, num_rows, program - num_tokens, ROWS, MINE,
            TILE, CHUNK, GROUP, RAGGED,
        )  # fmt: skip


@triton.jit
def _embed(
    token_ids, table, gamma, residual, scaled, squares, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    at = row.to(tl.int64) * WIDTH + i
    found = tl.load(table + tl.load(token_ids + row) * WIDTH + i, mask=inside, other=0.0)
    if SCALE != 1.0:
        found = (found.to(tl.float32) * SCALE).to(table.dtype.element_ty)
    tl.store(residual + at, found, mask=inside)
    if SCALED:
        value = found.to(tl.float32)
        weight = tl.load(gamma + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(scaled + at, (value * weight).to(scaled.dtype.element_ty), mask=inside)
        tl.store(squares + row, tl.sum(exact_square(found), 0))


@triton.jit
def _items_of(
    r, window, seq_lens, query_start_loc, num_rows, TILE: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """Return rows' lengths, the tiles before the visible ones, a part's tiles, the number of items, the number of full
    ones, and the last one's tiles if it is not full. GROUP: parts of an item. RAGGED: no items for rows with another
    number of query tokens than one.
    """
    length = tl.load(seq_lens + r, mask=r < num_rows, other=0)
    decodes = r < num_rows
    if RAGGED:
        next_row = tl.load(query_start_loc + 1 + r, mask=r < num_rows, other=0)
        queries = next_row - tl.load(query_start_loc + r, mask=r < num_rows, other=0)
        decodes = decodes & (queries == 1)
    hidden = tl.where(window > 0, tl.maximum(length - window, 0) // TILE, 0)
    tiles = (length + TILE - 1) // TILE - hidden
    each = tl.maximum((tiles + _MAX_PARTS - 1) // _MAX_PARTS, CHUNK)
    of_item = each * GROUP
    count = tl.maximum((tiles + of_item - 1) // of_item, 1)  # a masked row has one too, which writes zeros
    full = tl.where(decodes, tiles // of_item, 0)
    return length, hidden, each, tl.where(decodes, count, 0), full, tl.maximum(tiles - full * of_item, 0)


@triton.jit
def _cut(
    seq_lens, query_start_loc, windows, items, total, chunk_lens, num_rows, program, ROWS: tl.constexpr,
    MINE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Write the items of MINE rows for one window: row, first token, end, the row's first index among all items, its
    number of items, a part's tiles, the row's length, and the item's index. RAGGED: also write the lengths of rows
    without items.

    The longest items come first, so that programs end at about the same time: full items by row, then
    the others by length.
    """
    PROGRAMS: tl.constexpr = ROWS // MINE
    which = program // PROGRAMS
    window = tl.load(windows + which)
    r = tl.arange(0, ROWS)
    _, _, _, counts, fulls, rests = _items_of(
        r, window, seq_lens, query_start_loc, num_rows, TILE, CHUNK, GROUP, RAGGED
    )
    mine = program % PROGRAMS * MINE + tl.arange(0, MINE)
    length, hidden, each, count, full, rest = _items_of(
        mine, window, seq_lens, query_start_loc, num_rows, TILE, CHUNK, GROUP, RAGGED
    )
    if RAGGED:
        if which == 0:
            tl.store(chunk_lens + mine, tl.where(count > 0, 0, length), mask=mine < num_rows)
    earlier = r[None, :] < mine[:, None]
    before = tl.sum(tl.where(earlier, counts[None, :], 0), 1)
    full_before = tl.sum(tl.where(earlier, fulls[None, :], 0), 1)
    longer_rest = (rests[None, :] > rest[:, None]) | ((rests[None, :] == rest[:, None]) & earlier)
    rests_before = tl.sum(tl.where(longer_rest, counts[None, :] - fulls[None, :], 0), 1)
    p = tl.arange(0, _MAX_PARTS)[None, :]
    ok = p < count[:, None]
    first = (hidden[:, None] + p * each[:, None] * GROUP) * TILE
    end = tl.minimum(first + each[:, None] * (GROUP * TILE), length[:, None])
    place = tl.where(p < full[:, None], full_before[:, None] + p, (tl.sum(fulls, 0) + rests_before)[:, None])
    at = items + (which * num_rows * _MAX_PARTS + place) * _RECORD
    tl.store(at, mine[:, None] + p * 0, mask=ok)
    tl.store(at + 1, first, mask=ok)
    tl.store(at + 2, tl.where(count[:, None] == 1, length[:, None], end), mask=ok)
    tl.store(at + 3, before[:, None] + p * 0, mask=ok)
    tl.store(at + 4, count[:, None] + p * 0, mask=ok)
    tl.store(at + 5, each[:, None] + p * 0, mask=ok)
    tl.store(at + 6, length[:, None] + p * 0, mask=ok)
    tl.store(at + 7, before[:, None] + p, mask=ok)
    if program % PROGRAMS == 0:
        tl.store(total + which * _TOTAL, tl.sum(counts, 0))


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
        table if gamma is None else gamma,
        residual,
        residual if scaled is None else scaled,
        residual if squares is None else squares,
        seq_lens,
        seq_lens if query_start_loc is None else query_start_loc,
        windows,
        items,
        total,
        seq_lens if chunk_lens is None else chunk_lens,
        tokens,
        rows,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=all_rows,
        MINE=mine,
        TILE=plan.tile,
        CHUNK=plan.chunk,
        GROUP=plan.group if plan.grouped else 1,
        RAGGED=ragged,
        SCALED=gamma is not None,
        SCALE=scale,
        num_warps=4,
    )
    return AttentionWork(items, total)
