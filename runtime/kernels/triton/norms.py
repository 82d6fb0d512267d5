"""Root-mean-square normalisation, alone and fused with the residual's addition: one program a token. And the squares
for a norm that others make: they sum them by tiles, and whoever reads the residual adds the tiles up."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.layers import Norm
from runahead.runtime.kernels.triton.dependent_launch import let_dependents_start, wait_for_predecessors

_ROUND_BELOW = tl.constexpr(2.0**-15)
_ROUNDER = tl.constexpr(1.5 * 2.0**-7)  # added and taken away again, it leaves multiples of 2**-30


@triton.jit
def exact_square(value):
    """Squares of bfloat16 numbers held in float32, as float64: multiples of 2**-30. Sums of them below 2**23 have no
    rounding, so no order. A square has 16 bits; one below 2**-15 is rounded, by far less than any norm's epsilon."""
    square = value * value
    return tl.where(square < _ROUND_BELOW, (square + _ROUNDER) - _ROUNDER, square).to(tl.float64)


@triton.jit
def _rms_norm_kernel(x, x_stride, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    let_dependents_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessors(DEPENDENT)
    v = tl.load(x + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / WIDTH + eps)
    tl.store(out + row * WIDTH + i, (v * scale * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm_kernel(x, residual, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    v = tl.load(x + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    v += tl.load(residual + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    rounded = v.to(residual.dtype.element_ty)
    tl.store(residual + row * WIDTH + i, rounded, mask=inside)
    v = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / WIDTH + eps)
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, (v * scale * w).to(out.dtype.element_ty), mask=inside)


def _launch_shape(width: int) -> tuple[int, int]:
    """Elements of a program's block, and its warps."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 512, 1), 8)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, dependent: bool = False) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, in float32, rounded once.

    x: [T, H]. weight: [H]. dependent: launched programmatically. Returns [T, H] in x's dtype.
    """
    tokens, width = x.shape
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    block, warps = _launch_shape(width)
    options: dict[str, Any] = {"launch_pdl": True} if dependent else {}
    _rms_norm_kernel[(tokens,)](
        x, x.stride(0), weight, out, eps, WIDTH=width, BLOCK=block, DEPENDENT=dependent, num_warps=warps, **options
    )
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`residual += x` in place, then `rms_norm` of it.

    x, residual: contiguous [T, H]. weight: [H]. Returns [T, H] in x's dtype.
    """
    tokens, width = x.shape
    out = torch.empty_like(x)
    block, warps = _launch_shape(width)
    _add_rms_norm_kernel[(tokens,)](x, residual, weight, out, eps, WIDTH=width, BLOCK=block, num_warps=warps)
    return out


class LateSum:
    """A residual, [T, H] contiguous, and a product that it still lacks. The norm that follows makes the sum too, in one
    kernel."""

    def __init__(self, residual: torch.Tensor) -> None:
        self._residual = residual
        self._product: torch.Tensor | None = None  # [T, H]

    def add(self, product: torch.Tensor) -> None:
        """Every product is followed by a norm before the next one."""
        assert self._product is None
        self._product = product

    def normed(self, norm: Norm) -> torch.Tensor:
        """The norm of the whole sum, which the residual then is. [T, H]"""
        product, self._product = self._product, None
        if product is None:
            return rms_norm(self._residual, norm.weight, norm.eps)
        return add_rms_norm(product, self._residual, norm.weight, norm.eps)
