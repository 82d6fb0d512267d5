"""Logistic gates, and the kernel that gates attention outputs."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

_BLOCK: Final = 1024


@triton.jit
def logistic(x):
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _logistic_mul_kernel(x, gate, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply a row's block by its gates. STRIDE: between gates of rows."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    value = tl.load(x + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    factor = logistic(tl.load(gate + row * STRIDE + i, mask=inside, other=0.0).to(tl.float32))
    tl.store(x + row * WIDTH + i, (value * factor).to(x.dtype.element_ty), mask=inside)


def logistic_mul(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Compute x *= 1 / (1 + exp(-gate)) in place in float32, rounded once. x: contiguous [T, width]. gate: rows of
    `width` contiguous numbers.
    """
    tokens, width = x.shape
    _logistic_mul_kernel[(tokens, triton.cdiv(width, _BLOCK))](
        x, gate, WIDTH=width, STRIDE=gate.stride(0), BLOCK=_BLOCK, num_warps=4
    )
