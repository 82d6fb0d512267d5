"""Gates by the logistic function: of what attention has found, and of what a shared expert gives."""

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
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _logistic_mul_kernel(x, gate, WIDTH: tl.constexpr, STRIDE: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """EACH: every number has a gate of its own; else all of a row have one. STRIDE: between gates of rows."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    value = tl.load(x + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    if EACH:
        share = logistic(tl.load(gate + row * STRIDE + i, mask=inside, other=0.0).to(tl.float32))
    else:
        share = logistic(tl.load(gate + row * STRIDE).to(tl.float32))
    tl.store(x + row * WIDTH + i, (value * share).to(x.dtype.element_ty), mask=inside)


def logistic_mul(x: torch.Tensor, gate: torch.Tensor) -> None:
    """x *= 1 / (1 + exp(-gate)) in place, in float32, rounded once. x: contiguous [T, width]. gate: rows of as many
    contiguous numbers, or of one."""
    tokens, width = x.shape
    each = gate.shape[1] == width
    assert each or gate.shape[1] == 1
    _logistic_mul_kernel[(tokens, triton.cdiv(width, _BLOCK))](
        x, gate, WIDTH=width, STRIDE=gate.stride(0), EACH=each, BLOCK=_BLOCK, num_warps=4
    )
