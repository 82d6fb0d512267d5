"""What follows a product of the vendor's library: the scale of the norm before, the bias and the activation, or the sum
with the residual. Each value has the bits that `epilogue.py` makes of the same sums.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.activations import is_gelu
from runahead.runtime.kernels.layers import Activation, Linear, Norm
from runahead.runtime.kernels.triton.gemm.gemv import GATED, SQUARED, STORE
from runahead.runtime.kernels.triton.ops.activation import gated, squared_relu
from runahead.runtime.kernels.triton.ops.norms import exact_square, launch_shape

_BLOCK: Final = 512
_GATED, _SQUARED = tl.constexpr(GATED), tl.constexpr(SQUARED)


@triton.jit
def _finish_kernel(
    sums, bias, squares, out, eps, WIDTH: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
    SQUARES: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    GELU: tl.constexpr,
):  # fmt: skip
    """One program for a row and BLOCK of its outputs."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    HALVES: tl.constexpr = 2 if EPILOGUE == _GATED else 1
    at = sums + row * HALVES * WIDTH + i
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if EPILOGUE == _GATED:
        up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if SQUARES > 0:
        s = tl.arange(0, STEP)
        found = tl.sum(tl.load(squares + s * STRIDE + row, mask=s < SQUARES, other=0.0), 0)
        scale = tl.rsqrt(found.to(tl.float32) / DEPTH + eps)
        value *= scale
        if EPILOGUE == _GATED:
            up *= scale
    if HAS_BIAS:
        value += tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
        if EPILOGUE == _GATED:
            up += tl.load(bias + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    if EPILOGUE == _GATED:
        value = gated(value, up, GELU)
    if EPILOGUE == _SQUARED:
        value = squared_relu(value)
    tl.store(out + row * WIDTH + i, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_kernel(
    sums, bias, residual, gamma, scaled, squares, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    value = tl.load(sums + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    old = tl.load(residual + row * WIDTH + i, mask=inside, other=0.0)
    following = tl.load(gamma + i, mask=inside, other=0.0)
    if HAS_BIAS:
        value += tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    value += old.to(tl.float32)
    rounded = value.to(residual.dtype.element_ty)
    tl.store(residual + row * WIDTH + i, rounded, mask=inside)
    value = rounded.to(tl.float32)
    tl.store(scaled + row * WIDTH + i, (value * following.to(tl.float32)).to(scaled.dtype.element_ty), mask=inside)
    tl.store(squares + row, tl.sum(exact_square(value), 0))


def finish_product(
    sums: torch.Tensor,
    linear: Linear,
    squares: tuple[torch.Tensor, int, float] | None,
    epilogue: int,
    activation: Activation = "silu",
) -> torch.Tensor:
    """The values of a product, [T, outputs], from its sums in 16 bits, [T, outputs], or twice as many if GATED.

    linear: the product. squares: of the norm before it, as `small_batch_product` has them; None: there is none.
    epilogue: STORE, GATED or SQUARED. Where nothing is to be done, `sums` are the values.
    """
    bias = linear.bias
    if squares is None and bias is None and epilogue == STORE:
        return sums
    tokens, width = sums.shape[0], sums.shape[1] // (2 if epilogue == GATED else 1)
    out = sums if epilogue != GATED else sums.new_empty((tokens, width))
    found, tiles, eps = squares if squares is not None else (sums, 0, 0.0)
    _finish_kernel[(tokens, triton.cdiv(width, _BLOCK))](
        sums,
        sums if bias is None else bias,
        found,
        out,
        eps,
        WIDTH=width,
        DEPTH=linear.weight.shape[1],
        BLOCK=_BLOCK,
        SQUARES=tiles,
        STRIDE=found.shape[1],
        STEP=triton.next_power_of_2(max(tiles, 1)),
        EPILOGUE=epilogue,
        HAS_BIAS=bias is not None,
        GELU=is_gelu(activation),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def add_scaled(
    sums: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    following: Norm,
    scaled: torch.Tensor,
    squares: torch.Tensor,
) -> None:
    """`residual += sums + bias` in place, [T, H] contiguous; `scaled`, [T, H], becomes the residual times the weight of
    the norm that follows, and the first row of `squares`, float64 [1 or more, T or more], the sums of its squares."""
    tokens, width = sums.shape
    block, warps = launch_shape(width)
    _add_kernel[(tokens,)](
        sums,
        sums if bias is None else bias,
        residual,
        following.weight,
        scaled,
        squares,
        WIDTH=width,
        BLOCK=block,
        HAS_BIAS=bias is not None,
        num_warps=warps,
        enable_fp_fusion=False,
    )
