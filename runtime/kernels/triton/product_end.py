"""What follows a product of rows with a matrix in the same kernel: the scale of the norm before, the bias, and what is
done with the sums. Its input is a tile of sums, outputs by rows of the batch.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.triton import row_product
from runahead.runtime.kernels.triton.norms import exact_square

ADD, GATED = tl.constexpr(row_product.ADD), tl.constexpr(row_product.GATED)


@triton.jit
def _sum_of_squares(
    squares, column, num_rows, SQUARES: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr
):
    """Of each row, all tiles of the residual together: float32 [COLUMNS]."""
    found = tl.zeros([COLUMNS], tl.float64)
    for first in tl.static_range(0, SQUARES, STEP):
        s = first + tl.arange(0, STEP)
        made = (s < SQUARES)[:, None] & (column < num_rows)[None, :]
        found += tl.sum(tl.load(squares + s[:, None] * STRIDE + column[None, :], mask=made, other=0.0), 0)
    return found.to(tl.float32)


@triton.jit
def product_end(
    acc, tile, column, bias, squares_in, out, places, gamma, scaled, squares_out, eps, num_rows, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SQUARES: tl.constexpr, STRIDE: tl.constexpr,
    STEP: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """acc: [ROWS outputs, COLUMNS rows of the batch]; GATED: [2 * ROWS, COLUMNS], as `gated_row` has them."""
    output = tile * ROWS + tl.arange(0, ROWS)
    ok = (output < OUTPUTS)[:, None] & (column < num_rows)[None, :]
    place = column
    if PLACED:
        place = tl.load(places + column, mask=column < num_rows, other=0)
    at = place.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    if SQUARES > 0:
        found = _sum_of_squares(squares_in, column, num_rows, SQUARES, STRIDE, COLUMNS, STEP)
        acc *= tl.rsqrt(found / DEPTH + eps)[None, :]
    if EPILOGUE == GATED:
        pairs = tl.permute(tl.reshape(acc, [ROWS // 8, 2, 8, COLUMNS]), (0, 2, 3, 1))
        gate, up = tl.split(pairs)
        gate = tl.reshape(gate, [ROWS, COLUMNS])
        up = tl.reshape(up, [ROWS, COLUMNS])
        if HAS_BIAS:
            gate += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias + OUTPUTS + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
        acc = gate / (1.0 + tl.exp(-gate)) * up
    elif HAS_BIAS:
        acc += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
    if EPILOGUE == ADD:
        acc += tl.load(out + at, mask=ok, other=0.0).to(tl.float32)
    rounded = acc.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=ok)
    if EPILOGUE == ADD:
        value = rounded.to(tl.float32)
        weight = tl.load(gamma + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)
        tl.store(scaled + at, (value * weight[:, None]).to(scaled.dtype.element_ty), mask=ok)
        squares = tl.sum(tl.where(ok, exact_square(value), 0.0), 0)
        tl.store(squares_out + tile * STRIDE + column, squares, mask=column < num_rows)


@triton.jit
def gated_row(tile, r, OUTPUTS: tl.constexpr, ROWS: tl.constexpr):
    """The row of the weights that is row r of a tile's [2 * ROWS]. Eight rows of the gate and the eight of `up` that
    belong to them stand by turns: the matrix units leave a row and the eighth after it to the same thread."""
    output = tl.minimum(tile * ROWS + r // 16 * 8 + r % 8, OUTPUTS - 1)
    return output + (r // 8) % 2 * OUTPUTS
