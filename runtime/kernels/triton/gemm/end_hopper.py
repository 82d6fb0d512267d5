"""The epilogue of a product of many rows in Gluon, with the arithmetic of `epilogue.py`, for a group of warps that
holds the sums of 64 rows.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from runahead.runtime.kernels.triton.gemm.epilogue import ADD, GATED, SQUARED
from runahead.runtime.kernels.triton.ops.activation import gated, squared_relu
from runahead.runtime.kernels.triton.ops.norms import exact_square

ROWS: Final = 64  # of a group of warps
_SQUARES: Final = 16  # tiles of squares that a thread loads at a time

_ROWS, _SQUARES_STEP = gl.constexpr(ROWS), gl.constexpr(_SQUARES)
_ADD, _GATED, _SQUARED = gl.constexpr(ADD), gl.constexpr(GATED), gl.constexpr(SQUARED)
_TILED = gl.constexpr(gl.BlockedLayout([_SQUARES, 1], [1, 32], [1, 4], [1, 0]))  # of squares: tiles by rows
_OF_ROWS = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([_SQUARES, 1], [1, 32], [1, 4], [1, 0])))


class Sizes(NamedTuple):
    """Constants of a product of many rows."""

    TILES: int  # of outputs
    DEPTH: int
    SEGMENTS: int
    CHAIN: int  # steps of a chain
    OUTPUTS: int
    PIECES: tuple[int, ...]  # weights that a matrix instruction takes; if GATED, gates and then as many factors
    WIDTH: int  # outputs of a tile
    HALVES: int
    BOX: int  # rows of the weights that are copied at a time
    SPLIT: bool  # the groups divide the segments
    PACED: bool  # the groups issue their chains alternately
    STAGES: int
    SCALED: bool  # a norm is before the product
    EPILOGUE: int
    HAS_BIAS: bool
    GELU: bool


@gluon.jit
def _end_part(value, up, output, row, scale, end, SIZES: gl.constexpr):
    """Apply the epilogue to rounded sums, [ROWS, COLUMNS]; up: their factors, if GATED. Returns the sums of squares,
    [ROWS]."""
    bias, _, out, gamma, scaled, _, _, _, _, num_rows = end
    COLUMNS: gl.constexpr = value.shape[1]
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    value = gl.convert_layout(value, FLAT).to(gl.float32)
    if SIZES.EPILOGUE == _GATED:
        up = gl.convert_layout(up, FLAT).to(gl.float32)
    output = output + gl.arange(0, COLUMNS, gl.SliceLayout(0, FLAT))
    row = row + gl.arange(0, _ROWS, gl.SliceLayout(1, FLAT))
    inside = output < SIZES.OUTPUTS
    ok = (row < num_rows)[:, None] & inside[None, :]
    at = row.to(gl.int64)[:, None] * SIZES.OUTPUTS + output[None, :]
    if SIZES.EPILOGUE == _ADD:
        old = gl.load(out + at, mask=ok, other=0.0)
    if SIZES.SCALED:
        by = gl.convert_layout(scale, gl.SliceLayout(1, FLAT))[:, None]
        value *= by
        if SIZES.EPILOGUE == _GATED:
            up *= by
    if SIZES.HAS_BIAS:
        value += gl.load(bias + output, mask=inside, other=0.0).to(gl.float32)[None, :]
        if SIZES.EPILOGUE == _GATED:
            up += gl.load(bias + SIZES.OUTPUTS + output, mask=inside, other=0.0).to(gl.float32)[None, :]
    if SIZES.EPILOGUE == _GATED:
        value = gated(value, up, SIZES.GELU)
    if SIZES.EPILOGUE == _SQUARED:
        value = squared_relu(value)
    if SIZES.EPILOGUE == _ADD:
        value += old.to(gl.float32)
    rounded = value.to(out.dtype.element_ty)
    gl.store(out + at, rounded, mask=ok)
    squares = gl.zeros([_ROWS], gl.float64, _OF_ROWS)
    if SIZES.EPILOGUE == _ADD:
        following = gl.load(gamma + output, mask=inside, other=0.0).to(gl.float32)
        left = (rounded.to(gl.float32) * following[None, :]).to(scaled.dtype.element_ty)
        gl.store(scaled + at, left, mask=ok)
        squares = gl.convert_layout(gl.sum(gl.where(ok, exact_square(rounded), 0.0), 1), _OF_ROWS)
    return squares


@gluon.jit
def end_tile(accs, tile, row, end, SIZES: gl.constexpr):
    """Apply the epilogue to a group's sums of a tile and store it. accs: a tensor for each matrix instruction, [ROWS,
    n], of which each has gates and then as many factors if GATED. tile: of WIDTH outputs. row: the group's first one.
    The sums are rounded first, as the vendor's library leaves them."""
    _, squares_in, out, _, _, squares_out, eps, squares_tiles, stride, num_rows = end
    output = tile * SIZES.WIDTH
    scale = gl.zeros([_ROWS], gl.float32, _OF_ROWS)
    if SIZES.SCALED:
        found = gl.zeros([_ROWS], gl.float64, _OF_ROWS)
        column = row + gl.arange(0, _ROWS, _OF_ROWS)
        for first in range(0, squares_tiles, _SQUARES_STEP):
            some = first + gl.arange(0, _SQUARES_STEP, gl.SliceLayout(1, _TILED))
            made = (some < squares_tiles)[:, None] & (column < num_rows)[None, :]
            at = squares_in + some[:, None] * stride + column[None, :]
            found += gl.sum(gl.load(at, mask=made, other=0.0), 0)
        scale = gl.rsqrt(found.to(gl.float32) / SIZES.DEPTH + eps)
    total = gl.zeros([_ROWS], gl.float64, _OF_ROWS)
    for piece in gl.static_range(len(accs)):
        value = accs[piece].to(out.dtype.element_ty)
        parts = (value,)
        if value.shape[1] > 64 or SIZES.EPILOGUE == _GATED:  # every thread has both halves in its own registers
            halves = gl.reshape(value, [_ROWS, 2, value.shape[1] // 2])
            parts = gl.split(gl.permute(halves, (0, 2, 1)))
        squares = _end_part(parts[0], parts[len(parts) - 1], output, row, scale, end, SIZES)
        output += parts[0].shape[1]
        if len(parts) == 2 and SIZES.EPILOGUE != _GATED:
            squares += _end_part(parts[1], parts[1], output, row, scale, end, SIZES)
            output += parts[1].shape[1]
        total += squares
    if SIZES.EPILOGUE == _ADD:
        column = row + gl.arange(0, _ROWS, _OF_ROWS)
        gl.store(squares_out + tile * stride + column, total, mask=column < num_rows)
