"""The epilogue of a product, in the same kernel: the scale of the previous norm, the bias, and how sums are stored. Its
input is a tile of sums, outputs by rows of the batch.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.ops.activation import gated, squared_relu
from runahead.runtime.kernels.triton.ops.norms import exact_square

STORE: Final = 0  # out = product
ADD: Final = 1  # out += product
GATED: Final = 2  # out = activation(gate) * up, of the product's two halves
SQUARED: Final = 3  # out = relu(product)^2
EPILOGUES: Final = ("store", "add", "gated", "squared")  # their names
# The norm before a product, whose scale the product applies: float64 [tiles, rows or more] sums of squares, how many
# tiles they are, and epsilon. None: there is no norm, or its scale is applied already.
Squares = tuple[torch.Tensor, int, float] | None
_ADD, _GATED, _SQUARED = tl.constexpr(ADD), tl.constexpr(GATED), tl.constexpr(SQUARED)


class Sizes(NamedTuple):
    """Constants of a product's tile and its end."""

    OUTPUTS: int  # of the product, half of the weights' rows if GATED
    DEPTH: int
    ROWS: int  # outputs of a tile
    COLUMNS: int  # rows of the batch of a tile
    SQUARES: int  # tiles of the sums of squares before; 0: no norm is before the product
    STRIDE: int  # between two tiles of sums of squares
    STEP: int  # tiles of them that are loaded at a time
    EPILOGUE: int
    GELU: bool
    LONE: bool  # there is one row


class End(NamedTuple):
    """The tensors of a product's end. None: there is no such thing."""

    bias: torch.Tensor | None  # [outputs], twice as many if GATED
    targets: torch.Tensor | None  # int32 [rows] the row of the output to which each row goes
    squares_in: torch.Tensor | None  # float64 [tiles, rows] sums of squares for the norm before
    eps: float  # of that norm
    gamma: torch.Tensor | None  # [outputs] the weight of the norm that follows
    scaled: torch.Tensor | None  # [rows, outputs] what that norm's reader gets
    squares_out: torch.Tensor | None  # float64 [tiles, rows]


@triton.jit
def _squares_from(squares, first, column, num_rows, SIZES: tl.constexpr):
    """Sums of squares of STEP tiles of the residual, from `first` on: float64 [STEP, COLUMNS], or [STEP, 1] of a lone
    row."""
    s = first + tl.arange(0, SIZES.STEP)
    of = tl.arange(0, 1) if SIZES.LONE else column
    made = (s < SIZES.SQUARES)[:, None] & (of < num_rows)[None, :]
    return tl.load(squares + s[:, None] * SIZES.STRIDE + of[None, :], mask=made, other=0.0)


@triton.jit
def end_weights(tile, end, SIZES: tl.constexpr):
    """Load the weights of a tile's epilogue, before the program waits for predecessors: the bias of its outputs, of the
    second half too if there are two, and the weight of the next norm, [ROWS] each."""
    output = tile * SIZES.ROWS + tl.arange(0, SIZES.ROWS)
    ok = output < SIZES.OUTPUTS
    first = 0.0
    second = 0.0
    following = 0.0
    if end.bias is not None:
        first = tl.load(end.bias + output, mask=ok, other=0.0)
        if SIZES.EPILOGUE == _GATED:
            second = tl.load(end.bias + SIZES.OUTPUTS + output, mask=ok, other=0.0)
    if SIZES.EPILOGUE == _ADD:
        following = tl.load(end.gamma + output, mask=ok, other=0.0)
    return first, second, following


@triton.jit
def end_rows(tile, column, out, end, num_rows, SIZES: tl.constexpr):
    """Load the batch's rows for a tile's epilogue as soon as they are written, so that the end does not wait for them:
    the first sums of squares (see `_squares_from`), and the residual, [ROWS, COLUMNS]."""
    squares = 0.0
    old = 0.0
    if SIZES.SQUARES > 0:
        squares = _squares_from(end.squares_in, 0, column, num_rows, SIZES)
    if SIZES.EPILOGUE == _ADD:
        output = tile * SIZES.ROWS + tl.arange(0, SIZES.ROWS)
        ok = (output < SIZES.OUTPUTS)[:, None] & (column < num_rows)[None, :]
        old = tl.load(out + column.to(tl.int64)[None, :] * SIZES.OUTPUTS + output[:, None], mask=ok, other=0.0)
    return squares, old


@triton.jit
def product_end(acc, tile, column, weights, rows, out, end, num_rows, SIZES: tl.constexpr):
    """Apply the epilogue to a tile of sums and store it. acc: [ROWS outputs, COLUMNS rows of the batch]; GATED: [2 *
    ROWS, COLUMNS], as `gated_row` has them. weights, rows: what `end_weights` and `end_rows` give. The sums are rounded
    to the dtype of `out` first, as the vendor's library leaves them."""
    acc = acc.to(out.dtype.element_ty).to(tl.float32)
    first, second, following = weights
    squares, old = rows
    output = tile * SIZES.ROWS + tl.arange(0, SIZES.ROWS)
    ok = (output < SIZES.OUTPUTS)[:, None] & (column < num_rows)[None, :]
    target = column
    if end.targets is not None:
        target = tl.load(end.targets + column, mask=column < num_rows, other=0)
    at = target.to(tl.int64)[None, :] * SIZES.OUTPUTS + output[:, None]
    if SIZES.SQUARES > 0:
        STEP: tl.constexpr = SIZES.STEP
        SQUARES: tl.constexpr = SIZES.SQUARES
        found = tl.sum(squares, 0)
        for later in tl.static_range(STEP, SQUARES, STEP):
            found += tl.sum(_squares_from(end.squares_in, later, column, num_rows, SIZES), 0)
        acc *= tl.rsqrt(found.to(tl.float32) / SIZES.DEPTH + end.eps)[None, :]
    if SIZES.EPILOGUE == _GATED:
        pairs = tl.permute(tl.reshape(acc, [SIZES.ROWS // 8, 2, 8, acc.shape[1]]), (0, 2, 3, 1))
        gate, up = tl.split(pairs)
        gate = tl.reshape(gate, [SIZES.ROWS, acc.shape[1]])
        up = tl.reshape(up, [SIZES.ROWS, acc.shape[1]])
        if end.bias is not None:
            gate += first.to(tl.float32)[:, None]
            up += second.to(tl.float32)[:, None]
        acc = gated(gate, up, SIZES.GELU)
    elif end.bias is not None:
        acc += first.to(tl.float32)[:, None]
    if SIZES.EPILOGUE == _SQUARED:
        acc = squared_relu(acc)
    if SIZES.EPILOGUE == _ADD:
        acc += old.to(tl.float32)
    rounded = acc.to(out.dtype.element_ty)
    if (SIZES.LONE or end.bias is not None) and SIZES.EPILOGUE == _ADD:
        tl.debug_barrier()  # a small tile is loaded in two layouts: every warp has read what is written over
    tl.store(out + at, rounded, mask=ok)
    if SIZES.EPILOGUE == _ADD:
        value = rounded.to(tl.float32)
        following = value * following.to(tl.float32)[:, None]
        tl.store(end.scaled + at, following.to(end.scaled.dtype.element_ty), mask=ok)
        left = tl.sum(tl.where(ok, exact_square(rounded), 0.0), 0)
        tl.store(end.squares_out + tile * SIZES.STRIDE + column, left, mask=column < num_rows)


@triton.jit
def gated_row(tile, r, OUTPUTS: tl.constexpr, ROWS: tl.constexpr):
    """The row of the weights that is row r of a tile's [2 * ROWS]. Eight rows of the gate and the eight of `up` that
    belong to them stand by turns: the matrix units leave a row and the eighth after it to the same thread."""
    output = tl.minimum(tile * ROWS + r // 16 * 8 + r % 8, OUTPUTS - 1)
    return output + (r // 8) % 2 * OUTPUTS
