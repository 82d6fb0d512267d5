"""Rows in FP8 before a product of the vendor's library, and what follows one: the scale of the norm before, the bias
and the activation, or the sum with the residual. Each value has the bits that `epilogue.py` makes of the same sums.
Rows that a product with an FP8 matrix reads are left in FP8 too, with the bits of `fp8_rows`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.activations import is_gelu_tanh
from runahead.runtime.kernels.layers import Activation, Linear, Norm
from runahead.runtime.kernels.quantized_weight import FP8_COLUMNS, Fp8Weight
from runahead.runtime.kernels.triton.gemm.epilogue import ADD, GATED, SQUARED, STORE, Squares
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
_VALUES_BLOCK: Final = 2048  # where sums are the values
_ROWS, _MANY_ROWS = 4, 256  # a program has _ROWS rows in launches of at least _MANY_ROWS
_COLUMNS = tl.constexpr(FP8_COLUMNS)
_ADD, _GATED, _SQUARED = tl.constexpr(ADD), tl.constexpr(GATED), tl.constexpr(SQUARED)


@triton.jit(do_not_specialize=["num_rows"])
def _finish_kernel(
    sums, channels, bias, squares, out, in_fp8, following, num_rows, eps, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SQUARES: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr,
    EPILOGUE: tl.constexpr, GELU: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Apply a product's epilogue to its sums: BLOCK outputs of ROWS rows a program, with ADD whole rows.

    out: gets the values, or with ADD is the residual to which they are added. squares: of the norm before the product,
    in SQUARES tiles. in_fp8: gets the values in FP8, with ADD what the next norm's reader gets: numbers, scales, and
    how many scales a block has. following: with ADD, the weight of the norm that follows, and where the residual times
    it and the residual's sums of squares go.
    """
    let_dependents_start(DEPENDENT)
    start = tl.program_id(0).to(tl.int64) * ROWS
    first = 0 if EPILOGUE == _ADD else tl.program_id(1) * BLOCK
    i = first + tl.arange(0, BLOCK)
    inside = i < WIDTH
    if EPILOGUE == _ADD:
        gamma, scaled, squares_out = following
        weight = tl.load(gamma + i, mask=inside, other=0.0)
    of_first = _of_outputs(channels, bias, i, inside)
    of_second = of_first
    if EPILOGUE == _GATED:
        of_second = _of_outputs(channels, bias, WIDTH + i, inside)
    HALVES: tl.constexpr = 2 if EPILOGUE == _GATED else 1
    wait_for_predecessors(DEPENDENT)
    values, others, norms = (), (), ()
    for r in tl.static_range(ROWS):
        row = start + r
        there = True if ROWS == 1 else row < num_rows
        at = sums + row * (HALVES * WIDTH) + i
        values = longer(values, tl.load(at, mask=inside & there, other=0.0))
        if EPILOGUE == _GATED:
            others = longer(others, tl.load(at + WIDTH, mask=inside & there, other=0.0))
        if EPILOGUE == _ADD:
            others = longer(others, tl.load(out + row * WIDTH + i, mask=inside & there, other=0.0))
        if SQUARES > 0:
            s = tl.arange(0, STEP)
            found = tl.load(squares + s * STRIDE + row, mask=(s < SQUARES) & there, other=0.0)
            norms = longer(norms, tl.rsqrt(tl.sum(found, 0).to(tl.float32) / DEPTH + eps))
    for r in tl.static_range(ROWS):
        row = start + r
        there = True if ROWS == 1 else row < num_rows
        scale = norms[r] if SQUARES > 0 else None
        value = _scaled(values[r], channels, bias, of_first, scale)
        if EPILOGUE == _GATED:
            value = gated(value, _scaled(others[r], channels, bias, of_second, scale), GELU)
        if EPILOGUE == _SQUARED:
            value = squared_relu(value)
        if EPILOGUE == _ADD:
            value += others[r].to(tl.float32)
        rounded = value.to(out.dtype.element_ty if EPILOGUE == _ADD else sums.dtype.element_ty)
        read = rounded
        if EPILOGUE == _ADD or in_fp8 is None:
            tl.store(out + row * WIDTH + i, rounded, mask=inside & there)
        if EPILOGUE == _ADD:
            read = (rounded.to(tl.float32) * weight.to(tl.float32)).to(scaled.dtype.element_ty)
            tl.store(scaled + row * WIDTH + i, read, mask=inside)
        if in_fp8 is not None:
            numbers, scales, scales_stride = in_fp8
            quantized, scale_of_block = to_fp8(tl.reshape(read.to(tl.float32), [BLOCK // _COLUMNS, _COLUMNS]))
            block = first // _COLUMNS + tl.arange(0, BLOCK // _COLUMNS)
            column = block[:, None] * _COLUMNS + tl.arange(0, _COLUMNS)[None, :]
            ok = (block < WIDTH // _COLUMNS) & there
            tl.store(numbers + row * WIDTH + column, quantized, mask=ok[:, None])
            tl.store(scales + block * scales_stride + row, scale_of_block, mask=ok)
        if EPILOGUE == _ADD:
            tl.store(squares_out + row, tl.sum(exact_square(rounded), 0))


@triton.jit
def _of_outputs(channels, bias, output, inside):
    """The scales and biases of outputs, which a program loads before it waits."""
    scale = 1.0
    added = 0.0
    if channels is not None:
        scale = tl.load(channels + output, mask=inside, other=0.0)
    if bias is not None:
        added = tl.load(bias + output, mask=inside, other=0.0)
    return scale, added


@triton.jit
def _scaled(value, channels, bias, of_outputs, scale):
    """Sums times the scales of outputs and rows, plus the bias: float32. None: there is no such thing."""
    value = value.to(tl.float32)
    if channels is not None:
        value *= of_outputs[0]
    if scale is not None:
        value *= scale
    if bias is not None:
        value += of_outputs[1].to(tl.float32)
    return value


def finish_product(
    sums: torch.Tensor,
    linear: Linear,
    squares: Squares,
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
    squares: Squares,
    epilogue: int,
    activation: Activation = "silu",
    *,
    dependent: bool = False,
) -> Fp8Rows:
    """`fp8_rows` of what `finish_product` gives, whose width is a multiple of 128."""
    rows = empty_rows(sums.shape[0], sums.shape[1] // (2 if epilogue == GATED else 1), sums.device)
    _finish(sums, linear, squares, epilogue, activation, sums, rows, dependent)
    return rows


def fp8_rows(x: torch.Tensor, num_rows: int, dependent: bool = False) -> Fp8Rows:
    """The first rows of x in FP8. x: bfloat16 [num_rows or more, in], contiguous, `in` a multiple of 128."""
    rows = empty_rows(num_rows, x.shape[1], x.device)
    _finish(x[:num_rows], None, None, STORE, "silu", x, rows, dependent)
    return rows


def _finish(
    sums: torch.Tensor,
    linear: Linear | None,
    squares: Squares,
    epilogue: int,
    activation: Activation,
    out: torch.Tensor,
    rows: Fp8Rows | None,
    dependent: bool,
    following: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    tokens, width = sums.shape[0], sums.shape[1] // (2 if epilogue == GATED else 1)
    found, tiles, eps = (None, 0, 0.0) if squares is None else squares
    dependent = dependent and dependent_launch_works()
    at_once = _ROWS if tokens >= _MANY_ROWS and epilogue != ADD else 1
    block, warps = launch_shape(width) if epilogue == ADD else (_BLOCK, 4)
    if linear is None and epilogue != ADD:
        at_once, block = 1, min(triton.next_power_of_2(width), _VALUES_BLOCK)
    _finish_kernel[(triton.cdiv(tokens, at_once), triton.cdiv(width, block))](
        sums,
        None if linear is None else _channels(linear),
        None if linear is None else linear.bias,
        found,
        out,
        None if rows is None else (rows.numbers, rows.scales, len(rows)),
        following,
        tokens,
        eps,
        WIDTH=width,
        DEPTH=width if linear is None else linear.weight.shape[1],
        ROWS=at_once,
        BLOCK=block,
        SQUARES=tiles,
        STRIDE=0 if found is None else found.shape[1],
        STEP=triton.next_power_of_2(max(tiles, 1)),
        EPILOGUE=epilogue,
        GELU=is_gelu_tanh(activation),
        DEPENDENT=dependent,
        num_warps=warps,
        enable_fp_fusion=False,
        launch_pdl=dependent,
    )


def _channels(linear: Linear) -> torch.Tensor | None:
    """Return the factors of rounded sums, float32 [outputs], or None."""
    return linear.quantized.channels if isinstance(linear.quantized, Fp8Weight) else None


def add_scaled(
    sums: torch.Tensor,
    linear: Linear | None,
    residual: torch.Tensor,
    following: Norm,
    scaled: torch.Tensor,
    squares: torch.Tensor,
    before: Squares = None,
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
    rows = empty_rows(sums.shape[0], sums.shape[1], sums.device) if in_fp8 else None
    _finish(sums, linear, before, ADD, "silu", residual, rows, dependent, (following.weight, scaled, squares))
    return rows
