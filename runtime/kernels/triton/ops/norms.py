"""RMS norms, one program a token; and sums of squares, which the residual's readers use."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.layers import Attention, Norm
from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors

_ROUND_BELOW = tl.constexpr(2.0**-15)
_ROUNDER = tl.constexpr(1.5 * 2.0**-7)  # adding and subtracting it rounds float32 to multiples of 2**-30
_WIDE_ROUNDER = tl.constexpr(1.5 * 2.0**22)  # the same of float64
_SQUARES_ROUNDER = tl.constexpr(1.5 * 2.0**17)  # of float64 to multiples of 2**-35


@triton.jit
def exact_square(value):
    """Square numbers, rounded to multiples of 2**-30, by far less than any norm's epsilon: float64. Sums below 2**23
    are exact, so their order does not matter. A square of bfloat16 has 16 bits, so one from 2**-15 on is exact.
    """
    if value.dtype == tl.bfloat16:
        value = value.to(tl.float32)
        square = value * value
        square = tl.where(square < _ROUND_BELOW, (square + _ROUNDER) - _ROUNDER, square).to(tl.float64)
    else:
        square = value.to(tl.float64) * value.to(tl.float64)
        square = (square + _WIDE_ROUNDER) - _WIDE_ROUNDER
    return square


@triton.jit
def squares_of(value):
    """Squares of float32 numbers, as float64: multiples of 2**-35, so that sums of them below 2**18 have no rounding,
    and no order."""
    square = value.to(tl.float64) * value.to(tl.float64)
    return (square + _SQUARES_ROUNDER) - _SQUARES_ROUNDER


@triton.jit
def sum_of_squares(value):
    """The sum of the squares of float32 numbers, [n], with no order: float32."""
    return tl.sum(squares_of(value), 0).to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    x, x_stride, weight, residual, out, gamma, squares, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Normalize a token into `out` or, if there is a residual, add it there; then `out`, if there is gamma, the weight
    of the norm that follows, is the residual times gamma, and `squares` gets the sum of the residual's squares.
    """
    let_dependents_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    stride = x_stride if residual is None else WIDTH
    wait_for_predecessors(DEPENDENT)
    v = tl.load(x + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / WIDTH + eps)
    if residual is None:
        tl.store(out + row * WIDTH + i, (v * scale * w).to(out.dtype.element_ty), mask=inside)
    else:
        old = tl.load(residual + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
        rounded = (old + v * scale * w).to(residual.dtype.element_ty)
        tl.store(residual + row * WIDTH + i, rounded, mask=inside)
        if gamma is not None:
            value = rounded.to(tl.float32)
            following = tl.load(gamma + i, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + row * WIDTH + i, (value * following).to(out.dtype.element_ty), mask=inside)
            tl.store(squares + row, tl.sum(exact_square(rounded), 0))


@triton.jit
def _norm_across_heads_kernel(
    qkv, q_weight, k_weight, q_eps, k_eps, Q_SIZE: tl.constexpr, KV_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Normalize a token's queries in one program, and its keys in another."""
    keys = tl.program_id(1) == 1
    i = tl.arange(0, BLOCK)
    width = tl.where(keys, KV_SIZE, Q_SIZE)
    inside = i < width
    at = qkv + tl.program_id(0).to(tl.int64) * (Q_SIZE + 2 * KV_SIZE) + tl.where(keys, Q_SIZE, 0) + i
    v = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(q_weight + i, mask=inside & (keys == 0), other=0.0).to(tl.float32)
    w += tl.load(k_weight + i, mask=inside & keys, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / width + tl.where(keys, k_eps, q_eps))
    tl.store(at, (v * scale * w).to(qkv.dtype.element_ty), mask=inside)


def launch_shape(width: int) -> tuple[int, int]:
    """Return a program's block size and its warps."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 512, 1), 8)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, dependent: bool = False) -> torch.Tensor:
    """Compute x / sqrt(mean(x²) + eps) * weight over the last dimension in float32, rounded once.

    x: [T, H]. weight: [H]. dependent: launched with programmatic dependent launch. Returns [T, H] in x's dtype.
    """
    tokens, width = x.shape
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    block, warps = launch_shape(width)
    _rms_norm_kernel[(tokens,)](
        x, x.stride(0), weight, None, out, None, None, eps, WIDTH=width, BLOCK=block, DEPENDENT=dependent,
        num_warps=warps, launch_pdl=dependent,
    )  # fmt: skip
    return out


def add_normed(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm,
    following: Norm | None = None,
    scaled: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
) -> None:
    """Compute `residual += norm(x)` in place.

    x, residual: contiguous [T, H]. following, scaled, squares, all or none: outputs `scaled`, [T, H], the residual
    times the following norm's weight, and `squares`, float64 [1 or more, T or more], the sums of its squares.
    """
    tokens, width = x.shape
    block, warps = launch_shape(width)
    _rms_norm_kernel[(tokens,)](
        x, width, norm.weight, residual, scaled, None if following is None else following.weight, squares, norm.eps,
        WIDTH=width, BLOCK=block, DEPENDENT=False, num_warps=warps,
    )  # fmt: skip


def norm_across_heads(qkv: torch.Tensor, weights: Attention) -> Attention:
    """Normalize queries and keys in place over all heads of a token, if the model does so.

    qkv: contiguous [T, (heads + 2 * kv_heads) * D]. Returns the mixer without these norms.
    """
    q_norm, k_norm, shape = weights.q_norm, weights.k_norm, weights.shape
    if not weights.norms_span_heads or q_norm is None or k_norm is None:
        return weights
    block, warps = launch_shape(shape.q_size)
    _norm_across_heads_kernel[(qkv.shape[0], 2)](
        qkv,
        q_norm.weight,
        k_norm.weight,
        q_norm.eps,
        k_norm.eps,
        Q_SIZE=shape.q_size,
        KV_SIZE=shape.kv_size,
        BLOCK=block,
        num_warps=warps,
    )
    return replace(weights, q_norm=None, k_norm=None, norms_span_heads=False)
