"""Counter-based random numbers on the device, with the bits of `reference.philox`.

The same operations in the same order, each rounded separately: kernels that call these functions are launched with
`enable_fp_fusion=False`, because a fused multiply-add has other bits.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.reference import philox

_LN2_HIGH = tl.constexpr(philox.LN2_HIGH)
_LN2_LOW = tl.constexpr(philox.LN2_LOW)
_LOG2_E = tl.constexpr(philox.LOG2_E)
_SQRT_HALF_BITS = tl.constexpr(philox.SQRT_HALF_BITS)
_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_EXP_LOWEST = tl.constexpr(philox.EXP_LOWEST)


@triton.jit
def block_words(seed, position, block):
    """Return the four words of counter (position, block, 0, 0). seed: int64. position: int32. block: int32 [b].

    Both halves of a product are one instruction.
    """
    c0 = (position + tl.zeros_like(block)).to(tl.uint32)
    c1 = block.to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint64)
    k1 = seed.to(tl.uint64) >> 32
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * _MULTIPLIER_0
        p1 = c2.to(tl.uint64) * _MULTIPLIER_1
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0.to(tl.uint32), p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1.to(tl.uint32), p0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def word_of(seed, position, token):
    """Return the random word of single tokens, uint32, equal to `block_words`."""
    words = block_words(seed, position, token // 4)
    low = tl.where(token % 2 == 0, words[0], words[1])
    return tl.where(token % 4 < 2, low, tl.where(token % 2 == 0, words[2], words[3]))


@triton.jit
def uniform(word):
    """Convert uint32 random words to numbers strictly between 0 and 1."""
    return ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23


@triton.jit
def gumbel(word):
    """Convert uint32 random words to standard Gumbel noise."""
    return -log32(-log32(uniform(word)))


@triton.jit
def log32(x):
    """Compute the natural logarithm of positive normal float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    e = exponent.to(tl.float32)
    s = tl.div_rn(f, f + 2.0)
    s2 = s * s
    series = s2 * (2 / 9) + (2 / 7)
    series = s2 * series + (2 / 5)
    series = s2 * series + (2 / 3)
    log_m = (s + s) + (s * s2) * series
    return e * _LN2_HIGH + (e * _LN2_LOW + log_m)


@triton.jit
def exp32(x):
    """Compute e**x of float32 numbers that are zero, negative or -inf; 0 below `philox.EXP_LOWEST`."""
    clamped = tl.maximum(x, _EXP_LOWEST)
    n = tl.floor(clamped * _LOG2_E + 0.5)
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    series = r * (1 / 5040) + (1 / 720)
    series = series * r + (1 / 120)
    series = series * r + (1 / 24)
    series = series * r + (1 / 6)
    series = series * r + 0.5
    series = series * r + 1.0
    series = series * r + 1.0
    scale = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < _EXP_LOWEST, 0.0, series * scale)
