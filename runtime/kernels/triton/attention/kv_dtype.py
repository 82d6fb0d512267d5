"""The dtype of the KV cache: the served dtype, or FP8 with a scale for each KV head.

FP8 is e4m3: a number is stored as e4m3(number / scale), rounded to nearest even. Finite numbers beyond 448 * scale
saturate; a non-finite number is stored as NaN, so that its row reports it. Kernels multiply scores by the keys' scale
and the weighted sum by the values' scale: every e4m3 number is exact in the served dtype.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

_LARGEST = tl.constexpr(448.0)


@triton.jit
def head_scales(kv_scales, kv_head, KV_HEADS: tl.constexpr):
    """Load the scales of a KV head's keys and values. kv_scales: float32 [2, KV_HEADS], keys first; None: both are
    1.
    """
    key_scale = 1.0
    value_scale = 1.0
    if kv_scales is not None:
        key_scale = tl.load(kv_scales + kv_head)
        value_scale = tl.load(kv_scales + KV_HEADS + kv_head)
    return key_scale, value_scale


@triton.jit
def as_kept(x, scale, kv_scales, dtype: tl.constexpr):
    """Convert numbers to the cache's dtype. scale: from `head_scales`."""
    if kv_scales is not None:
        x = x.to(tl.float32)
        bounded = tl.minimum(tl.maximum(tl.div_rn(x, scale), -_LARGEST), _LARGEST)
        x = tl.where(tl.abs(x) < float("inf"), bounded, float("nan"))
    return x.to(dtype)
