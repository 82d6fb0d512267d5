"""What follows a product of the vendor's library: the scale of the norm before, the bias and the activation, or the sum
with the residual. Each value has the bits that `epilogue.py` makes of the same sums. Rows that a product with an FP8
matrix reads are left in FP8 too, with the bits of `fp8_rows`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.activations import is_gelu
from runahead.runtime.kernels.layers import Activation, Linear, Norm
from runahead.runtime.kernels.quantized_weight import FP8_COLUMNS, Fp8Weight
from runahead.runtime.kernels.triton.gemm.epilogue import GATED, SQUARED, STORE
from runahead.runtime.kernels.triton.gemm.fp8_rows import Fp8Rows, empty_rows, to_fp8
from runahead.runtime.kernels.triton.gpu.pdl import (
    dependent_launch_works,
    let_dependents_start,
    wait_for_predecessors,
)
from runahead.runtime.kernels.triton.gpu.unrolled import longer
from runahead.runtime.kernels.triton.ops.activation import gated, squared_relu
from runahead.runtime.kernels.triton.ops.norms import exact_square, launch_shape

_BLOCK: Final = 1024
_ROWS, _MANY_ROWS = 4, 256  # a program has _ROWS rows in launches of at least _MANY_ROWS
_COLUMNS = tl.constexpr(FP8_COLUMNS)
_GATED, _SQUARED = tl.constexpr(GATED), tl.constexpr(SQUARED)


@triton.jit
def _finish_kernel(
    sums, channels, bias, squares, out, numbers, scales, num_rows, padded_rows, eps, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SQUARES: tl.constexpr, STRIDE: tl.constexpr,
    STEP: tl.constexpr, EPILOGUE: tl.constexpr, HAS_CHANNELS: tl.constexpr, HAS_BIAS: tl.constexpr,
    GELU: tl.constexpr, FP8: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for ROWS rows and BLOCK of their outputs."""
    let_dependents_start(DEPENDENT)
    start = tl.program_id(0).to(tl.int64) * ROWS
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    first = _of_outputs(channels, bias, i, inside, HAS_CHANNELS, HAS_BIAS)
    second = first
    if EPILOGUE == _GATED:
        second = _of_outputs(channels, bias, WIDTH + i, inside, HAS_CHANNELS, HAS_BIAS)
    HALVES: tl.constexpr = 2 if EPILOGUE == _GATED else 1
    wait_for_predecessors(DEPENDENT)
    values = ()
    ups = ()
    norms = ()
    for r in tl.static_range(ROWS):
        at = sums + (start + r) * (HALVES * WIDTH) + i
        ok = inside & (start + r < num_rows)
        values = longer(values, tl.load(at, mask=ok, other=0.0))
        if EPILOGUE == _GATED:
            ups = longer(ups, tl.load(at + WIDTH, mask=ok, other=0.0))
        if SQUARES > 0:
            norm = _scale_of(squares, start + r, start + r < num_rows, eps, DEPTH, SQUARES, STRIDE, STEP)
            norms = longer(norms, norm)
    for r in tl.static_range(ROWS):
        scale = 1.0
        if SQUARES > 0:
            scale = norms[r]
        value = _scaled(values[r], first, scale, HAS_CHANNELS, SQUARES, HAS_BIAS)
        if EPILOGUE == _GATED:
            value = gated(value, _scaled(ups[r], second, scale, HAS_CHANNELS, SQUARES, HAS_BIAS), GELU)
        if EPILOGUE == _SQUARED:
            value = squared_relu(value)
        rounded = value.to(sums.dtype.element_ty)
        if FP8:
            first_column = tl.program_id(1) * BLOCK
            _store_fp8(rounded, first_column, numbers, scales, start + r, num_rows, padded_rows, WIDTH, BLOCK)
        else:
            tl.store(out + (start + r) * WIDTH + i, rounded, mask=inside & (start + r < num_rows))


@triton.jit
def _of_outputs(channels, bias, output, inside, HAS_CHANNELS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The scales and biases of outputs, which a program loads before it waits."""
    scale = 1.0
    added = 0.0
    if HAS_CHANNELS:
        scale = tl.load(channels + output, mask=inside, other=0.0)
    if HAS_BIAS:
        added = tl.load(bias + output, mask=inside, other=0.0)
    return scale, added


@triton.jit
def _scaled(value, of_outputs, scale, HAS_CHANNELS: tl.constexpr, SQUARES: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Sums times the scales of outputs and rows, plus the bias: float32."""
    value = value.to(tl.float32)
    if HAS_CHANNELS:
        value *= of_outputs[0]
    if SQUARES > 0:
        value *= scale
    if HAS_BIAS:
        value += of_outputs[1].to(tl.float32)
    return value


@triton.jit
def _scale_of(
    squares, row, live, eps, DEPTH: tl.constexpr, TILES: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr
):
    """The scale of a row's norm over DEPTH numbers, from its sums of squares in TILES tiles. live: there is the row."""
    s = tl.arange(0, STEP)
    found = tl.sum(tl.load(squares + s * STRIDE + row, mask=(s < TILES) & live, other=0.0), 0)
    return tl.rsqrt(found.to(tl.float32) / DEPTH + eps)


@triton.jit
def _store_fp8(values, first, numbers, scales, row, num_rows, padded_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store BLOCK values of a row, from column `first` on, in FP8, if there is the row."""
    quantized, scale = to_fp8(tl.reshape(values.to(tl.float32), [BLOCK // _COLUMNS, _COLUMNS]))
    block = first // _COLUMNS + tl.arange(0, BLOCK // _COLUMNS)
    at = block[:, None] * _COLUMNS + tl.arange(0, _COLUMNS)[None, :]
    inside = (block < WIDTH // _COLUMNS) & (row < num_rows)
    tl.store(numbers + row * WIDTH + at, quantized, mask=inside[:, None])
    tl.store(scales + block * padded_rows + row, scale, mask=inside)


@triton.jit
def _add_kernel(
    sums, channels, bias, residual, gamma, scaled, squares, numbers, scales, padded_rows, before, eps,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, SQUARES: tl.constexpr, STRIDE: tl.constexpr,
    STEP: tl.constexpr, HAS_CHANNELS: tl.constexpr, HAS_BIAS: tl.constexpr, FP8: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for a row. SQUARES: tiles of `before`, of the norm before the product; 0: there is none."""
    let_dependents_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    following = tl.load(gamma + i, mask=inside, other=0.0)
    of_outputs = _of_outputs(channels, bias, i, inside, HAS_CHANNELS, HAS_BIAS)
    wait_for_predecessors(DEPENDENT)
    value = tl.load(sums + row * WIDTH + i, mask=inside, other=0.0)
    old = tl.load(residual + row * WIDTH + i, mask=inside, other=0.0)
    scale = 1.0
    if SQUARES > 0:
        scale = _scale_of(before, row, True, eps, DEPTH, SQUARES, STRIDE, STEP)
    value = _scaled(value, of_outputs, scale, HAS_CHANNELS, SQUARES, HAS_BIAS)
    value += old.to(tl.float32)
    rounded = value.to(residual.dtype.element_ty)
    tl.store(residual + row * WIDTH + i, rounded, mask=inside)
    value = rounded.to(tl.float32)
    left = (value * following.to(tl.float32)).to(scaled.dtype.element_ty)
    tl.store(scaled + row * WIDTH + i, left, mask=inside)
    if FP8:
        _store_fp8(left, 0, numbers, scales, row, row + 1, padded_rows, WIDTH, BLOCK)
    tl.store(squares + row, tl.sum(exact_square(rounded), 0))


def finish_product(
    sums: torch.Tensor,
    linear: Linear,
    squares: tuple[torch.Tensor, int, float] | None,
    epilogue: int,
    activation: Activation = "silu",
    *,
    dependent: bool = False,
) -> torch.Tensor:
    """The values of a product, [T, outputs], from its sums in 16 bits, [T, outputs], or twice as many if GATED.

    linear: the product. squares: of the norm before it, as `small_batch_product` has them; None: there is none.
    epilogue: STORE, GATED or SQUARED. Where nothing is to be done, `sums` are the values. dependent: launched
    programmatically.
    """
    if squares is None and linear.bias is None and epilogue == STORE and _channels(linear) is None:
        return sums
    out = sums if epilogue != GATED else sums.new_empty((sums.shape[0], sums.shape[1] // 2))
    _finish(sums, linear, squares, epilogue, activation, out, None, dependent)
    return out


def finish_in_fp8(
    sums: torch.Tensor,
    linear: Linear,
    squares: tuple[torch.Tensor, int, float] | None,
    epilogue: int,
    activation: Activation = "silu",
    *,
    dependent: bool = False,
) -> Fp8Rows:
    """`fp8_rows` of what `finish_product` gives, whose width is a multiple of 128."""
    rows = empty_rows(sums.shape[0], sums.shape[1] // (2 if epilogue == GATED else 1), sums.device)
    _finish(sums, linear, squares, epilogue, activation, sums, rows, dependent)
    return rows


def _finish(
    sums: torch.Tensor,
    linear: Linear,
    squares: tuple[torch.Tensor, int, float] | None,
    epilogue: int,
    activation: Activation,
    out: torch.Tensor,
    rows: Fp8Rows | None,
    dependent: bool,
) -> None:
    bias, channels = linear.bias, _channels(linear)
    tokens, width = sums.shape[0], sums.shape[1] // (2 if epilogue == GATED else 1)
    found, tiles, eps = squares if squares is not None else (sums, 0, 0.0)
    options: dict[str, Any] = {"launch_pdl": True} if dependent and dependent_launch_works() else {}
    at_once = _ROWS if tokens >= _MANY_ROWS else 1
    _finish_kernel[(triton.cdiv(tokens, at_once), triton.cdiv(width, _BLOCK))](
        sums,
        sums if channels is None else channels,
        sums if bias is None else bias,
        found,
        out,
        *((out, out) if rows is None else (rows.numbers, rows.scales)),
        tokens,
        0 if rows is None else len(rows),
        eps,
        WIDTH=width,
        DEPTH=linear.weight.shape[1],
        ROWS=at_once,
        BLOCK=_BLOCK,
        SQUARES=tiles,
        STRIDE=found.shape[1],
        STEP=triton.next_power_of_2(max(tiles, 1)),
        EPILOGUE=epilogue,
        HAS_CHANNELS=channels is not None,
        HAS_BIAS=bias is not None,
        GELU=is_gelu(activation),
        FP8=rows is not None,
        DEPENDENT=bool(options),
        num_warps=4,
        enable_fp_fusion=False,
        **options,
    )


def _channels(linear: Linear) -> torch.Tensor | None:
    """By which rounded sums are multiplied, float32 [outputs]."""
    return linear.quantized.channels if isinstance(linear.quantized, Fp8Weight) else None


def add_scaled(
    sums: torch.Tensor,
    linear: Linear | None,
    residual: torch.Tensor,
    following: Norm,
    scaled: torch.Tensor,
    squares: torch.Tensor,
    before: tuple[torch.Tensor, int, float] | None = None,
    *,
    in_fp8: bool = False,
    dependent: bool = False,
) -> Fp8Rows | None:
    """`residual += ` the product's values in place, [T, H] contiguous; `scaled`, [T, H], becomes the residual times the
    weight of the norm that follows, and the first row of `squares`, float64 [1 or more, T or more], the sums of its
    squares.

    linear: the product; None: `sums` are its values. before: squares of the norm before it, as `small_batch_product`
    has them; None: there is none. in_fp8: returns `scaled` in FP8 too. dependent: launched programmatically.
    """
    tokens, width = sums.shape
    found, tiles, eps = before if before is not None else (squares, 0, 0.0)
    block, warps = launch_shape(width)
    bias, channels = (None, None) if linear is None else (linear.bias, _channels(linear))
    rows = empty_rows(tokens, width, sums.device) if in_fp8 else None
    options: dict[str, Any] = {"launch_pdl": True} if dependent and dependent_launch_works() else {}
    _add_kernel[(tokens,)](
        sums,
        sums if channels is None else channels,
        sums if bias is None else bias,
        residual,
        following.weight,
        scaled,
        squares,
        *((sums, sums, 0) if rows is None else (rows.numbers, rows.scales, len(rows))),
        found,
        eps,
        WIDTH=width,
        DEPTH=width if linear is None else linear.weight.shape[1],
        BLOCK=block,
        SQUARES=tiles,
        STRIDE=found.shape[1],
        STEP=triton.next_power_of_2(max(tiles, 1)),
        HAS_CHANNELS=channels is not None,
        HAS_BIAS=bias is not None,
        FP8=rows is not None,
        DEPENDENT=bool(options),
        num_warps=warps,
        enable_fp_fusion=False,
        **options,
    )
    return rows
