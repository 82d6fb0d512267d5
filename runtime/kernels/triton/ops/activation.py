"""Activations of feed-forwards: gated ones and squared ReLU."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.activations import is_gelu
from runahead.runtime.kernels.layers import GELU_CUBE, GELU_SLOPE, Activation

BLOCK: Final = 512


_SLOPE, _CUBE = tl.constexpr(GELU_SLOPE), tl.constexpr(GELU_CUBE)


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """Multiply `up` by the gate's GELU or SiLU, float32."""
    slope = gate
    if GELU:
        slope = _SLOPE * (gate + _CUBE * gate * gate * gate)
    return gate / (1.0 + tl.exp(-slope)) * up


@triton.jit
def squared_relu(x):
    """Square the positive part, float32; NaN stays NaN."""
    above = tl.where(x < 0.0, 0.0, x)
    return above * above


@triton.jit
def _squared_relu_kernel(x, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    i = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    at = x + tl.program_id(0).to(tl.int64) * WIDTH + i
    found = tl.load(at, mask=i < WIDTH, other=0.0).to(tl.float32)
    tl.store(at, squared_relu(found).to(x.dtype.element_ty), mask=i < WIDTH)


@triton.jit
def _gated_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    inside = i < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, gated(gate, up, GELU).to(out.dtype.element_ty), mask=inside)


def gated_mul(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Compute activation(gate) * up in float32, rounded once.

    gate_up: contiguous [T, 2 * F], the gate first. Returns [T, F].
    """
    tokens, double = gate_up.shape
    width = double // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    grid = (tokens, triton.cdiv(width, BLOCK))
    _gated_mul_kernel[grid](gate_up, out, WIDTH=width, BLOCK_WIDTH=BLOCK, GELU=is_gelu(activation), num_warps=4)
    return out


def squared_relu_of(x: torch.Tensor) -> torch.Tensor:
    """Compute relu(x)^2 in place in float32, rounded once, and return it. x: contiguous [T, F]."""
    tokens, width = x.shape
    _squared_relu_kernel[(tokens, triton.cdiv(width, BLOCK))](x, WIDTH=width, BLOCK_WIDTH=BLOCK, num_warps=4)
    return x
