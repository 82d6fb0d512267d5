"""Products of up to 16 rows with a matrix, on the matrix units, with each segment of the depth in one warp.

With few rows the product is bandwidth bound. A program computes few outputs. Each of its warps takes one
segment of the depth for some of them, and the segments are added in shared memory, in ascending order.

**Weights go from memory straight into the registers from which the matrix units read.** Of a tile of eight rows and 16
entries of the depth each thread of a warp loads four neighboring entries of one row, 8 bytes. The matrix units want
other entries in that thread. The order of the sum inside a step of 16 entries is free, provided that both sides have
the same one, so Triton gives both sides the order of the loads (`kWidth` 4): nothing moves between threads, and shared
memory is not used. Another layout would change the time but no bit (`test_triton_targets.py` inspects the compiled
kernels).

A warp adds up its segment, or each of its chains, in ascending steps of 16, as `small_batch_gemm.py` does, and the bits
are the same. The chains of a block are interleaved, so that the matrix units do not wait for one sum.

All the weights that registers hold are requested before the program waits for the rows; later ones replace those
already used.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)
# mypy: disable-error-code="assignment"
# (nor has a tuple that grows)
# ruff: noqa: RUF005
# (Triton compiles no starred expression)

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.gemm.epilogue import GATED, end_rows, end_weights, gated_row, product_end
from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.gpu.unrolled import longer

GRAIN: Final = 16  # entries of the depth that the matrix units add at once
WARP_OUTPUTS: Final = (8, 16, 32, 64)  # rows of the weights that a warp may have
_MOST_PREFETCHED: Final = 4
_WORDS: Final = 4096  # weights of a warp in flight at a time, 64 registers of a thread: as many again are copied
_WHOLE_WORDS: Final = 8192  # if they are the whole segment
_GRAIN = tl.constexpr(GRAIN)
_GATED = tl.constexpr(GATED)


def blocks_prefetched(segment: int, block: int, warp_outputs: int) -> int:
    """The number of blocks of a warp that are in flight at a time: up to four, limited by registers, a divisor of the
    segment's blocks. warp_outputs: rows of the weights that a warp has."""
    blocks = segment // block
    fitting = [1] + [
        loaded
        for loaded in range(2, _MOST_PREFETCHED + 1)
        if blocks % loaded == 0 and warp_outputs * block * loaded <= (_WHOLE_WORDS if loaded == blocks else _WORDS)
    ]
    return fitting[-1]


@triton.jit
def _tiles(at, first, GRAINS: tl.constexpr):
    """The weights of a block from entry `first` of each segment on: for each 16 entries a tile for every eight rows,
    [WARPS * 8, 16]. at: where these eights begin."""
    found = ()
    for g in tl.static_range(GRAINS):
        for e in tl.static_range(len(at)):
            found = found + (tl.load(at[e] + (first + g * _GRAIN)),)
    return found


@triton.jit
def _lines(at, first, ok, GRAINS: tl.constexpr, LINE_EIGHTS: tl.constexpr):
    """The rows of the batch, in the same way. ok: which of them exist, of each eight. Eights past those are zeros."""
    found = ()
    for g in tl.static_range(GRAINS):
        for e in tl.static_range(LINE_EIGHTS):
            if e < len(at):
                found = found + (tl.load(at[e] + (first + g * _GRAIN), mask=ok[e], other=0.0),)
            else:
                found = found + (tl.zeros(at[0].shape, at[0].dtype.element_ty),)
    return found


@triton.jit
def _side(tiles, first: tl.constexpr, WARPS: tl.constexpr, EIGHTS: tl.constexpr):
    """EIGHTS tiles from `first` on as one side of a product, [WARPS, EIGHTS * 8, 16]."""
    if EIGHTS == 1:
        side = tiles[first]
    elif EIGHTS == 2:
        pair = tl.join(tiles[first], tiles[first + 1])
        side = tl.permute(tl.reshape(pair, [WARPS, 8, _GRAIN, 2]), (0, 3, 1, 2))
    elif EIGHTS == 4:
        four = tl.join(tl.join(tiles[first], tiles[first + 1]), tl.join(tiles[first + 2], tiles[first + 3]))
        side = tl.permute(tl.reshape(four, [WARPS, 8, _GRAIN, 2, 2]), (0, 4, 3, 1, 2))
    else:
        low = tl.join(tl.join(tiles[first], tiles[first + 1]), tl.join(tiles[first + 2], tiles[first + 3]))
        high = tl.join(tl.join(tiles[first + 4], tiles[first + 5]), tl.join(tiles[first + 6], tiles[first + 7]))
        side = tl.permute(tl.reshape(tl.join(low, high), [WARPS, 8, _GRAIN, 2, 2, 2]), (0, 5, 4, 3, 1, 2))
    return tl.reshape(side, [WARPS, EIGHTS * 8, _GRAIN])


@triton.jit
def _added(
    acc, zero, w, x, WARPS: tl.constexpr, EIGHTS: tl.constexpr, LINE_EIGHTS: tl.constexpr, GRAINS: tl.constexpr,
    TURNED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """`acc` and the product of a block. CHAIN: grains of a chain that is summed by itself from `zero` on, the chains of
    a block interleaved; 0: all of them are summed in `acc`."""
    LENGTH: tl.constexpr = CHAIN if CHAIN > 0 else GRAINS
    CHAINS: tl.constexpr = GRAINS // LENGTH
    sums = ()
    for _ in tl.static_range(CHAINS):
        sums = longer(sums, zero if CHAIN > 0 else acc)
    for g in tl.static_range(LENGTH):
        later = ()
        for c in tl.static_range(CHAINS):
            left = _side(w, (c * LENGTH + g) * EIGHTS, WARPS, EIGHTS)
            right = _side(x, (c * LENGTH + g) * LINE_EIGHTS, WARPS, LINE_EIGHTS)
            if TURNED:
                later = longer(later, tl.dot(right, tl.permute(left, (0, 2, 1)), sums[c], input_precision="ieee"))
            else:
                later = longer(later, tl.dot(left, tl.permute(right, (0, 2, 1)), sums[c], input_precision="ieee"))
        sums = later
    for c in tl.static_range(CHAINS):
        acc = acc + sums[c] if CHAIN > 0 else sums[c]
    return acc


@triton.jit
def _in_order(acc, TILES: tl.constexpr, SEGMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The segments added in ascending order, [TILES * ROWS, COLUMNS], from [TILES * SEGMENTS, ROWS, COLUMNS]."""
    sums = tl.permute(tl.reshape(acc, [TILES, SEGMENTS, ROWS, COLUMNS]), (0, 2, 3, 1))
    parts = (tl.reshape(sums, [TILES * ROWS, COLUMNS, SEGMENTS]),)
    for halving in tl.static_range(3):  # into twice as many tensors of half as many segments each
        if SEGMENTS >> halving > 2:
            found = ()
            for p in tl.static_range(len(parts)):
                halves = tl.reshape(parts[p], [TILES * ROWS, COLUMNS, 2, SEGMENTS >> (halving + 1)])
                low, high = tl.split(tl.permute(halves, (0, 1, 3, 2)))
                found = found + (low, high)
            parts = found
    if SEGMENTS > 1:
        total, second = tl.split(parts[0])
        total += second
        for p in tl.static_range(1, len(parts)):
            first, second = tl.split(parts[p])
            total = total + first + second
    else:
        total = tl.reshape(parts[0], [TILES * ROWS, COLUMNS])
    return total


@triton.jit(do_not_specialize=["num_rows"])
def warp_split_k_kernel(
    x, weight, out, end, num_rows, SIZES: tl.constexpr, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr,
    TILES: tl.constexpr, PREFETCHED: tl.constexpr, CHAIN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute ROWS outputs of all rows, in TILES equal parts, each by as many warps as there are segments. PREFETCHED:
    blocks that each warp loads at a time, the first ones before the dependency wait."""
    let_dependents_start(DEPENDENT)
    tile = tl.program_id(0)
    COLUMNS: tl.constexpr = SIZES.COLUMNS
    PART: tl.constexpr = SIZES.DEPTH // SEGMENTS
    WARPS: tl.constexpr = TILES * SEGMENTS
    GRAINS: tl.constexpr = BLOCK // _GRAIN
    WARP_ROWS: tl.constexpr = (2 * SIZES.ROWS if SIZES.EPILOGUE == _GATED else SIZES.ROWS) // TILES
    EIGHTS: tl.constexpr = WARP_ROWS // 8
    TURNED: tl.constexpr = EIGHTS == 1  # the matrix units' left side has 16 rows
    LINE_EIGHTS: tl.constexpr = 2 if TURNED else COLUMNS // 8
    q = tl.arange(0, WARPS * 8)
    k = (q // 8 % SEGMENTS * PART)[:, None] + tl.arange(0, _GRAIN)[None, :]
    first_row = q // (8 * SEGMENTS) * WARP_ROWS + q % 8
    w_at = ()
    for e in tl.static_range(EIGHTS):
        if SIZES.EPILOGUE == _GATED:
            row = gated_row(tile, first_row + e * 8, SIZES.OUTPUTS, SIZES.ROWS)
        else:
            row = tl.minimum(tile * SIZES.ROWS + first_row + e * 8, SIZES.OUTPUTS - 1)
        w_at = w_at + (weight + row.to(tl.int64)[:, None] * SIZES.DEPTH + k,)
    x_at = ()
    ok = ()
    for e in tl.static_range(COLUMNS // 8):
        line = e * 8 + q % 8
        x_at = x_at + (x + line.to(tl.int64)[:, None] * SIZES.DEPTH + k,)
        ok = ok + ((line < num_rows)[:, None],)
    loaded = ()
    for p in tl.static_range(PREFETCHED):
        loaded = longer(loaded, _tiles(w_at, p * BLOCK, GRAINS))
    weights = end_weights(tile, end, SIZES)
    END_COLUMNS: tl.constexpr = 1 if SIZES.LONE else COLUMNS
    column = tl.arange(0, END_COLUMNS)
    wait_for_predecessors(DEPENDENT)
    rows = end_rows(tile, column, out, end, num_rows, SIZES)
    acc = tl.zeros([WARPS, 16, 8] if TURNED else [WARPS, WARP_ROWS, COLUMNS], tl.float32)
    zero = acc
    for first in tl.range(0, PART - PREFETCHED * BLOCK, PREFETCHED * BLOCK, num_stages=1):
        later = first + PREFETCHED * BLOCK
        following = ()
        for p in tl.static_range(PREFETCHED):
            lines = _lines(x_at, first + p * BLOCK, ok, GRAINS, LINE_EIGHTS)
            acc = _added(acc, zero, loaded[p], lines, WARPS, EIGHTS, LINE_EIGHTS, GRAINS, TURNED, CHAIN)
            following = longer(following, _tiles(w_at, later + p * BLOCK, GRAINS))
        loaded = following
    TOGETHER: tl.constexpr = COLUMNS == 8 and PREFETCHED * GRAINS <= 32  # so much of the rows fits into registers
    rest = ()
    for p in tl.static_range(PREFETCHED):
        rest = rest + (_lines(x_at, PART - (PREFETCHED - p) * BLOCK, ok, GRAINS, LINE_EIGHTS),)
        if not TOGETHER:
            acc = _added(acc, zero, loaded[p], rest[p], WARPS, EIGHTS, LINE_EIGHTS, GRAINS, TURNED, CHAIN)
    if TOGETHER:
        # One pass, which no compiler knows: so all rows are asked for before the matrix units wait for the first.
        for _ in range((num_rows + COLUMNS - 1) // COLUMNS):
            for p in tl.static_range(PREFETCHED):
                acc = _added(acc, zero, loaded[p], rest[p], WARPS, EIGHTS, LINE_EIGHTS, GRAINS, TURNED, CHAIN)
            zero = acc
    if TURNED:
        acc = tl.permute(acc, (0, 2, 1))
        if COLUMNS == 8:
            acc, _ = tl.split(tl.permute(tl.reshape(acc, [WARPS, 8, 2, 8]), (0, 1, 3, 2)))
    if SIZES.LONE:
        acc = tl.sum(acc, 2, keep_dims=True)  # the other columns are zeros
    acc = _in_order(acc, TILES, SEGMENTS, WARP_ROWS, END_COLUMNS)
    product_end(acc, tile, column, weights, rows, out, end, num_rows, SIZES)
