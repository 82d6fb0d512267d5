"""Activations of feed-forwards: gated ones and squared ReLU."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.layers import GELU_CUBE, GELU_SLOPE

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
