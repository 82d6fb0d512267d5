"""Keys and values as the cache keeps them: in the served dtype, or as FP8 with a scale for each KV head.

FP8 is e4m3: a number is stored as e4m3(number / scale), rounded to nearest even. Finite numbers beyond 448 * scale are
stored as 448 * scale; a number that is not finite is stored as NaN, so that its row reports it. A kernel multiplies
scores by the scale of keys and the weighted sum by the scale of values: every e4m3 number is exact in the served dtype.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

_LARGEST = tl.constexpr(448.0)


@triton.jit
def head_scales(kv_scales, kv_head, KV_HEADS: tl.constexpr):
    """The scales of a KV head's keys and values. kv_scales: float32 [2, KV_HEADS], keys first; None: both are 1."""
    key_scale = 1.0
    value_scale = 1.0
    if kv_scales is not None:
        key_scale = tl.load(kv_scales + kv_head)
        value_scale = tl.load(kv_scales + KV_HEADS + kv_head)
    return key_scale, value_scale


@triton.jit
def as_kept(x, scale, kv_scales, dtype: tl.constexpr):
    """Numbers in the dtype of the cache. scale: of `head_scales`."""
    if kv_scales is not None:
        x = x.to(tl.float32)
        bounded = tl.minimum(tl.maximum(tl.div_rn(x, scale), -_LARGEST), _LARGEST)
        x = tl.where(tl.abs(x) < float("inf"), bounded, float("nan"))
    return x.to(dtype)
