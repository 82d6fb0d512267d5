"""Products of up to 16 rows with a matrix, on the matrix units, a program's warps side by side along the depth.

With so few rows the time is that of reading the weights, and of what comes before and after. So a program has few
outputs and their whole depth: each of its *lanes*, a warp, takes a part of it, and the parts are added up in shared
memory, where a split product would meet in memory.

**Weights go from memory straight into the registers from which the matrix units read.** Of a tile of eight rows and 32
entries of the depth each thread of a warp loads eight entries of one row, 16 bytes. The matrix units want other entries
of a thread; but in which order the depth is added up is ours to choose, if both sides have the same. So `_side` calls
what a thread has loaded by the names of what it should have: nothing moves between threads, and no shared memory comes
between. Triton finds that out by itself. It may be wrong only about speed: what is computed is the same if it does not
(`test_triton_targets.py` looks at what it compiles).

All the weights that registers hold are asked for before the program waits for the rows; later ones take the place of
those that are used up.
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

GRAIN: Final = 32  # entries of the depth: four threads have eight each
_MOST_PREFETCHED: Final = 4
_WORDS: Final = 4096  # weights of a lane on their way at a time, 64 registers of a thread: as much again is copied
_WHOLE_WORDS: Final = 8192  # if they are all that it has
_GRAIN = tl.constexpr(GRAIN)


def blocks_prefetched(depth: int, lanes: int, block: int, tile: int) -> int:
    """How many blocks of a lane are on their way at a time: up to four, as many as registers hold, and so many that its
    part is a multiple of them. tile: rows of the weights that a program has."""
    blocks = depth // lanes // block
    fitting = [1] + [
        held
        for held in range(2, _MOST_PREFETCHED + 1)
        if blocks % held == 0 and tile * block * held <= (_WHOLE_WORDS if held == blocks else _WORDS)
    ]
    return fitting[-1]


@triton.jit
def _tiles(at, first, GRAINS: tl.constexpr):
    """The weights of a block from entry `first` of each lane's part on: of each 32 entries a tile for every eight rows,
    [LANES * 8, 32]. at: where these eights begin."""
    found = ()
    for g in tl.static_range(GRAINS):
        for e in tl.static_range(len(at)):
            found = found + (tl.load(at[e] + (first + g * _GRAIN)),)
    return found


@triton.jit
def _lines(at, first, ok, GRAINS: tl.constexpr):
    """The rows of the batch, in the same way. ok: which of them there are, of each eight."""
    found = ()
    for g in tl.static_range(GRAINS):
        for e in tl.static_range(len(at)):
            found = found + (tl.load(at[e] + (first + g * _GRAIN), mask=ok[e], other=0.0),)
    return found


@triton.jit
def _side(tiles, first: tl.constexpr, LANES: tl.constexpr, EIGHTS: tl.constexpr):
    """EIGHTS tiles from `first` on as one side of a product, [LANES, EIGHTS * 8, 32]. Of the eight entries of a thread
    four are called those that it should have among the first 16, and four among the others."""
    if EIGHTS == 1:
        side = tl.reshape(tiles[first], [LANES, 1, 1, 1, 8, 4, 2, 4])
    elif EIGHTS == 2:
        pair = tl.join(tiles[first], tiles[first + 1])
        side = tl.permute(tl.reshape(pair, [LANES, 8, 4, 2, 4, 1, 1, 2]), (0, 5, 6, 7, 1, 2, 3, 4))
    elif EIGHTS == 4:
        four = tl.join(tl.join(tiles[first], tiles[first + 1]), tl.join(tiles[first + 2], tiles[first + 3]))
        side = tl.permute(tl.reshape(four, [LANES, 8, 4, 2, 4, 1, 2, 2]), (0, 5, 7, 6, 1, 2, 3, 4))
    else:
        low = tl.join(tl.join(tiles[first], tiles[first + 1]), tl.join(tiles[first + 2], tiles[first + 3]))
        high = tl.join(tl.join(tiles[first + 4], tiles[first + 5]), tl.join(tiles[first + 6], tiles[first + 7]))
        side = tl.permute(tl.reshape(tl.join(low, high), [LANES, 8, 4, 2, 4, 2, 2, 2]), (0, 7, 6, 5, 1, 2, 3, 4))
    # Lanes, eights three times, rows, then of the entries: threads, halves, four. They become halves, threads, four.
    return tl.reshape(tl.permute(side, (0, 1, 2, 3, 4, 6, 5, 7)), [LANES, EIGHTS * 8, _GRAIN])


@triton.jit
def _added(acc, w, x, LANES: tl.constexpr, EIGHTS: tl.constexpr, LINE_EIGHTS: tl.constexpr, GRAINS: tl.constexpr):
    """`acc` and the product of a block."""
    for g in tl.static_range(GRAINS):
        left = _side(w, g * EIGHTS, LANES, EIGHTS)
        right = _side(x, g * LINE_EIGHTS, LANES, LINE_EIGHTS)
        acc = tl.dot(left, tl.permute(right, (0, 2, 1)), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def warp_split_k_kernel(
    x, weight, bias, squares_in, out, places, gamma, scaled, squares_out, eps, num_rows, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    PREFETCHED: tl.constexpr, SQUARES: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr, EPILOGUE: tl.constexpr,
    HAS_BIAS: tl.constexpr, PLACED: tl.constexpr, DEPENDENT: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Compute ROWS outputs of all rows. PREFETCHED: blocks that each lane loads at a time, the first ones before the
    dependency wait."""
    let_dependents_start(DEPENDENT)
    tile = tl.program_id(0)
    PART: tl.constexpr = DEPTH // LANES
    GRAINS: tl.constexpr = BLOCK // _GRAIN
    TILE_ROWS: tl.constexpr = 2 * ROWS if EPILOGUE == GATED else ROWS
    EIGHTS: tl.constexpr = TILE_ROWS // 8
    LINE_EIGHTS: tl.constexpr = COLUMNS // 8
    q = tl.arange(0, LANES * 8)
    k = (q // 8 * PART)[:, None] + tl.arange(0, _GRAIN)[None, :]
    w_at = ()
    for e in tl.static_range(EIGHTS):
        if EPILOGUE == GATED:
            row = gated_row(tile, e * 8 + q % 8, OUTPUTS, ROWS)
        else:
            row = tl.minimum(tile * ROWS + e * 8 + q % 8, OUTPUTS - 1)
        w_at = w_at + (weight + row.to(tl.int64)[:, None] * DEPTH + k,)
    x_at = ()
    ok = ()
    for e in tl.static_range(LINE_EIGHTS):
        line = e * 8 + q % 8
        x_at = x_at + (x + line.to(tl.int64)[:, None] * DEPTH + k,)
        ok = ok + ((line < num_rows)[:, None],)
    w0 = _tiles(w_at, 0, GRAINS)
    w1 = w0
    w2 = w0
    w3 = w0
    if PREFETCHED > 1:
        w1 = _tiles(w_at, BLOCK, GRAINS)
    if PREFETCHED > 2:
        w2 = _tiles(w_at, 2 * BLOCK, GRAINS)
    if PREFETCHED > 3:
        w3 = _tiles(w_at, 3 * BLOCK, GRAINS)
    weights = end_weights(tile, bias, gamma, OUTPUTS, ROWS, EPILOGUE, HAS_BIAS)
    column = tl.arange(0, COLUMNS)
    wait_for_predecessors(DEPENDENT)
    rows = end_rows(tile, column, squares_in, out, num_rows, OUTPUTS, ROWS, SQUARES, STRIDE, STEP, EPILOGUE)
    acc = tl.zeros([LANES, TILE_ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, PART - PREFETCHED * BLOCK, PREFETCHED * BLOCK, num_stages=1):
        later = first + PREFETCHED * BLOCK
        acc = _added(acc, w0, _lines(x_at, first, ok, GRAINS), LANES, EIGHTS, LINE_EIGHTS, GRAINS)
        w0 = _tiles(w_at, later, GRAINS)
        if PREFETCHED > 1:
            acc = _added(acc, w1, _lines(x_at, first + BLOCK, ok, GRAINS), LANES, EIGHTS, LINE_EIGHTS, GRAINS)
            w1 = _tiles(w_at, later + BLOCK, GRAINS)
        if PREFETCHED > 2:
            acc = _added(acc, w2, _lines(x_at, first + 2 * BLOCK, ok, GRAINS), LANES, EIGHTS, LINE_EIGHTS, GRAINS)
            w2 = _tiles(w_at, later + 2 * BLOCK, GRAINS)
        if PREFETCHED > 3:
            acc = _added(acc, w3, _lines(x_at, first + 3 * BLOCK, ok, GRAINS), LANES, EIGHTS, LINE_EIGHTS, GRAINS)
            w3 = _tiles(w_at, later + 3 * BLOCK, GRAINS)
    LAST: tl.constexpr = PART - PREFETCHED * BLOCK
    acc = _added(acc, w0, _lines(x_at, LAST, ok, GRAINS), LANES, EIGHTS, LINE_EIGHTS, GRAINS)
    if PREFETCHED > 1:
        acc = _added(acc, w1, _lines(x_at, LAST + BLOCK, ok, GRAINS), LANES, EIGHTS, LINE_EIGHTS, GRAINS)
    if PREFETCHED > 2:
        acc = _added(acc, w2, _lines(x_at, LAST + 2 * BLOCK, ok, GRAINS), LANES, EIGHTS, LINE_EIGHTS, GRAINS)
    if PREFETCHED > 3:
        acc = _added(acc, w3, _lines(x_at, LAST + 3 * BLOCK, ok, GRAINS), LANES, EIGHTS, LINE_EIGHTS, GRAINS)
    product_end(
        tl.sum(acc, 0), tile, column, weights, rows, squares_in, out, places, scaled, squares_out, eps, num_rows,
        OUTPUTS, DEPTH, COLUMNS, ROWS, SQUARES, STRIDE, STEP, EPILOGUE, HAS_BIAS, PLACED, GELU, False,
    )  # fmt: skip
