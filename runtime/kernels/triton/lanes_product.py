"""Products of up to 16 rows with a matrix, on the matrix units, a program's warps side by side along the depth.

With so few rows the time is that of reading the weights, and of what comes before and after. So a program has few
outputs and their whole depth: each of its *lanes*, a warp or some, takes a part of it, and the parts are added up in
shared memory, where a split product would meet in memory. All weights that registers hold are asked for before the
program waits for the rows.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.dependent_launch import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.product_end import GATED, end_rows, end_weights, gated_row, product_end


@triton.jit
def _of_lanes(w, x_at, ok, acc):
    return tl.dot(w, tl.load(x_at, mask=ok, other=0.0), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows"])
def lanes_product_kernel(
    x, weight, bias, squares_in, out, places, gamma, scaled, squares_out, eps, num_rows, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    SQUARES: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr, EPILOGUE: tl.constexpr,
    HAS_BIAS: tl.constexpr, PLACED: tl.constexpr, DEPENDENT: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """One program for ROWS outputs and all rows. Up to four blocks of each lane are asked for before the wait."""
    let_dependents_start(DEPENDENT)
    tile = tl.program_id(0)
    PART: tl.constexpr = DEPTH // LANES
    BLOCKS: tl.constexpr = PART // BLOCK
    HELD: tl.constexpr = min(BLOCKS, 4)
    TILE_ROWS: tl.constexpr = 2 * ROWS if EPILOGUE == GATED else ROWS
    r = tl.arange(0, TILE_ROWS)
    if EPILOGUE == GATED:
        row = gated_row(tile, r, OUTPUTS, ROWS)
    else:
        row = tl.minimum(tile * ROWS + r, OUTPUTS - 1)
    column = tl.arange(0, COLUMNS)
    k = (tl.arange(0, LANES) * PART)[:, None] + tl.arange(0, BLOCK)[None, :]
    w_at = weight + row.to(tl.int64)[None, :, None] * DEPTH + k[:, None, :]
    x_at = x + column.to(tl.int64)[None, None, :] * DEPTH + k[:, :, None]
    ok = (column < num_rows)[None, None, :]
    w0 = tl.load(w_at)
    if HELD > 1:
        w1 = tl.load(w_at + BLOCK)
    if HELD > 2:
        w2 = tl.load(w_at + 2 * BLOCK)
    if HELD > 3:
        w3 = tl.load(w_at + 3 * BLOCK)
    weights = end_weights(tile, bias, gamma, OUTPUTS, ROWS, EPILOGUE, HAS_BIAS)
    wait_for_predecessors(DEPENDENT)
    rows = end_rows(tile, column, squares_in, out, num_rows, OUTPUTS, ROWS, SQUARES, STRIDE, STEP, EPILOGUE)
    acc = _of_lanes(w0, x_at, ok, tl.zeros([LANES, TILE_ROWS, COLUMNS], tl.float32))
    if HELD > 1:
        acc = _of_lanes(w1, x_at + BLOCK, ok, acc)
    if HELD > 2:
        acc = _of_lanes(w2, x_at + 2 * BLOCK, ok, acc)
    if HELD > 3:
        acc = _of_lanes(w3, x_at + 3 * BLOCK, ok, acc)
    for i in tl.static_range(HELD, BLOCKS):
        acc = _of_lanes(tl.load(w_at + i * BLOCK), x_at + i * BLOCK, ok, acc)
    product_end(
        tl.sum(acc, 0), tile, column, weights, rows, squares_in, out, places, scaled, squares_out, eps, num_rows,
        OUTPUTS, DEPTH, COLUMNS, ROWS, SQUARES, STRIDE, STEP, EPILOGUE, HAS_BIAS, PLACED, GELU,
    )  # fmt: skip
