"""The beginning of F in a decode launch: tokens are embedded, and attention's work is cut into items.

Attention runs on a fixed number of programs, whatever the lengths are. What each of them does is found here, on the
device, from the lengths of this launch, so that a captured graph holds for every context. Into how many items a row is
cut depends on its own length and on the bucket alone, and so do its bits: no other row of the launch changes them.

The bits of an exact plan do not depend on the bucket either. A row's parts are summed in groups, and the groups'
results in order. With few rows each part is an item, so that a lone row keeps the GPU busy; with many rows an item is a
group, so that rows of many lengths load the programs evenly.

In a mixed launch only rows with one query token are cut: the others are prompt chunks, whose attention is
`chunk_attention`'s.
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

MAX_PARTS: Final = 32  # items of a row and a KV head
_MAX_PARTS = tl.constexpr(MAX_PARTS)
RECORD: Final = 8  # numbers of an item, so that each begins at 32 bytes
_RECORD = tl.constexpr(RECORD)
TOTAL: Final = 4  # numbers of a window's total, so that it begins at 16 bytes: Triton compiles for that, or for less
_TOTAL = tl.constexpr(TOTAL)
_ROWS_OF_A_PROGRAM: Final = 16  # that it cuts into items
_ROWS_OF_MIXED: Final = 512  # that a mixed launch is taken to have at least, so that one form serves them all


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How attention is cut. tile: tokens that a program looks at together. chunk: tiles of a part at most, or more
    where a row would have over MAX_PARTS parts. A part is an item. programs, warps: launched for all items, and of one
    program. stages: tiles on their way at a time. early: an item's first tile is asked for before its turn. exact: the
    newest part is summed first, then the others in order; otherwise a row's parts are equally long. group: parts that
    an exact plan sums before it adds their sum to the other groups' sums. grouped: an item is a group, not a part; no
    bit depends on it. share: query tokens of a row that a program looks at together, at most, a power of two; 0: all of
    them, where their sums fit."""

    tile: int
    chunk: int
    programs: int
    warps: int
    stages: int
    early: bool
    exact: bool = False
    group: int = 1
    grouped: bool = False
    share: int = 0

    def __post_init__(self) -> None:
        assert self.exact or (self.group == 1 and not self.grouped)
        assert not (self.early and self.grouped), "an item's first tile is then not that of its first part"

    def parts(self, context_length: int) -> int:
        """Items of a row and a KV head, at most."""
        return min(MAX_PARTS, ceil_div(context_length, self.tile * self.chunk))


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Of R rows, for each of the W windows that a model has. What a program must know of an item stands in one place:
    it asks for keys and values as soon as it has read that."""

    items: torch.Tensor  # int32 [W, R * MAX_PARTS, RECORD], as `_cut` writes them; those past the total are nothing
    total: torch.Tensor  # int32 [W, TOTAL] items of all rows; then nothing


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _begin_kernel(
    token_ids, table, gamma, residual, scaled, squares, seq_lens, query_start_loc, windows, items, total, chunk_lens,
    num_tokens, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    TILE: tl.constexpr, MINE: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, EXACT: tl.constexpr,
    RAGGED: tl.constexpr, SCALED: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Programs 0 to num_tokens - 1 embed a token each; then come some for each window that cut attention into items."""
    program = tl.program_id(0)
    if program < num_tokens:
        _embed(token_ids, table, gamma, residual, scaled, squares, program, WIDTH, BLOCK, SCALED, SCALE)
    else:
        _cut(
            seq_lens, query_start_loc, windows, items, total, chunk_lens, num_rows, program - num_tokens, ROWS, MINE,
            QUERIES, TILE, CHUNK, GROUP, EXACT, RAGGED,
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
        tl.store(squares + row, tl.sum(exact_square(value), 0))


@triton.jit
def _items_of(
    r, window, seq_lens, query_start_loc, num_rows, QUERIES: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, EXACT: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Rows' lengths, the tiles before what they see, the tiles of a part, how many items they are, how many of those
    are full, and the tiles of the last one if it is not. GROUP: parts of an item. RAGGED: none, of a row that has not
    one query token."""
    length = tl.load(seq_lens + r, mask=r < num_rows, other=0)
    first_end = length  # of what the row's first query token sees
    decodes = r < num_rows
    if (QUERIES > 1) | RAGGED:
        next_row = tl.load(query_start_loc + 1 + r, mask=r < num_rows, other=0)
        queries = next_row - tl.load(query_start_loc + r, mask=r < num_rows, other=0)
        if RAGGED:
            decodes = decodes & (queries == 1)
        else:
            first_end -= queries - 1
    hidden = tl.where(window > 0, tl.maximum(first_end - window, 0) // TILE, 0)
    tiles = (length + TILE - 1) // TILE - hidden
    each = tl.maximum((tiles + _MAX_PARTS - 1) // _MAX_PARTS, CHUNK)
    of_item = each * GROUP
    count = tl.maximum((tiles + of_item - 1) // of_item, 1)  # a masked row has one too, which leaves zeros
    if not EXACT:
        each = tl.maximum((tiles + count - 1) // count, 1)
        count = tl.maximum((tiles + each - 1) // each, 1)
    of_item = each * GROUP
    full = tl.where(decodes, tiles // of_item, 0)
    return length, hidden, each, tl.where(decodes, count, 0), full, tl.maximum(tiles - full * of_item, 0)


@triton.jit
def _cut(
    seq_lens, query_start_loc, windows, items, total, chunk_lens, num_rows, program, ROWS: tl.constexpr,
    MINE: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    EXACT: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """The items of MINE rows, for one window: of each its row, its first token and the one after its last, the row's
    first place among the items of all rows in order, its items, the tiles of a part, the row's length, and the item's
    place. RAGGED: and the lengths of rows that have no items here.

    In an exact plan the longest items come first, so that the programs end at about the same time: full ones, by rows,
    then the others by their lengths.
    """
    PROGRAMS: tl.constexpr = ROWS // MINE
    which = program // PROGRAMS
    window = tl.load(windows + which)
    r = tl.arange(0, ROWS)
    _, _, _, counts, fulls, rests = _items_of(
        r, window, seq_lens, query_start_loc, num_rows, QUERIES, TILE, CHUNK, GROUP, EXACT, RAGGED
    )
    mine = program % PROGRAMS * MINE + tl.arange(0, MINE)
    length, hidden, each, count, full, rest = _items_of(
        mine, window, seq_lens, query_start_loc, num_rows, QUERIES, TILE, CHUNK, GROUP, EXACT, RAGGED
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
    queries: int = 1,
    query_start_loc: torch.Tensor | None = None,
    chunk_lens: torch.Tensor | None = None,
) -> AttentionWork:
    """Embed query tokens into `residual`, [T or more, hidden], and cut attention over rows of these lengths.

    token_ids: int64 [T], inside the vocabulary; with T of 0 nothing is embedded. table: contiguous [vocab, hidden].
    seq_lens: int32 [R]. windows: int32 [W] tokens that a query sees, 0: all; W may be 0. scaled, squares, gamma, all or
    none: the residual times gamma, [hidden], and the sums of its squares, float64 [1, T or more]. scale: multiplies
    what is embedded. queries: query tokens of a row, at most; with more than one, query_start_loc says where each row's
    begin, int32 [R + 1]. chunk_lens: int32 [R], of a mixed launch, which needs query_start_loc and a window: becomes
    the lengths of the rows with another number of query tokens than one, which are not cut, and 0 of the others.
    """
    ragged = chunk_lens is not None
    assert (queries == 1 and not ragged) or query_start_loc is not None
    assert not ragged or (queries == 1 and windows.shape[0])
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
        QUERIES=triton.next_power_of_2(queries),
        TILE=plan.tile,
        CHUNK=plan.chunk,
        GROUP=plan.group if plan.grouped else 1,
        EXACT=plan.exact,
        RAGGED=ragged,
        SCALED=gamma is not None,
        SCALE=scale,
        num_warps=4,
    )
    return AttentionWork(items, total)
