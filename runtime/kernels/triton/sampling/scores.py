"""Scores and weights on the device with the reference's bits, in few instructions.

A token's score is the distance of its logit to the row's highest, divided by the temperature: zero or negative.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.reference.sampling_filters import MASS_ONE
from runahead.runtime.kernels.triton.sampling.philox import exp32

mass_one = tl.constexpr(MASS_ONE)
WORST_KEY = tl.constexpr(0x7F800000)  # of a score of -inf
NO_KEY = tl.constexpr(0x7FFFFFFF)  # of an entry that does not count: above all keys
_LIMB = tl.constexpr(2.0**20)  # half of the bits of a mass
_LIMB_BITS = tl.constexpr(20)
# Temperatures for which `scores_of` may multiply: neither a quotient nor a division's remainder leaves float32's normal
# range. A distance is then zero or at least 2**-56, half an ulp of the highest logit.
_LEAST_TEMPERATURE = tl.constexpr(2.0**-30)
_MOST_TEMPERATURE = tl.constexpr(2.0**30)
_LEAST_PEAK = tl.constexpr(2.0**-30)
_FARTHEST = tl.constexpr(-(2.0**90))


@triton.jit
def inverse_of(temperature, peak):
    """Return 1 / temperature if `scores_of` may multiply instead of dividing, otherwise 0."""
    usual = (temperature >= _LEAST_TEMPERATURE) & (temperature <= _MOST_TEMPERATURE) & (tl.abs(peak) >= _LEAST_PEAK)
    return tl.where(usual, tl.div_rn(tl.full([], 1.0, tl.float32), temperature), 0.0)


@triton.jit
def scores_of(x, peak, temperature, inverse):
    """Return (x - peak) / temperature, correctly rounded. inverse: from `inverse_of`.

    A product with two corrections is the correctly rounded quotient (Markstein, "Computation of elementary functions on
    the IBM RISC System/6000 processor", theorem 5) and takes half the instructions of a division. Distances beyond
    2**90, as of masked tokens, are clamped to it.
    """
    score = x - peak
    if inverse > 0.0:
        distance = tl.maximum(score, _FARTHEST)
        divisor = tl.zeros_like(x) - temperature
        factor = tl.zeros_like(x) + inverse
        score = distance * inverse
        score = tl.fma(tl.fma(divisor, score, distance), factor, score)
        score = tl.fma(tl.fma(divisor, score, distance), factor, score)
    else:
        score = tl.div_rn(score, temperature + tl.zeros_like(x))
    return score


@triton.jit
def key_of(score):
    """Return the key of a score that is zero of either sign or negative, or of a distance below the highest score."""
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def mass_of(score):
    """Return the probability mass in fixed point, 1 for the most likely token."""
    return (exp32(score) * mass_one).to(tl.int64)


@triton.jit
def limbs_of(score):
    """Return `mass_of` as two integer-valued float32: the high 20 bits, or 2**20, and the low 20 bits.

    Sums of up to 16 of them are exact, and float32 additions and selections take half the instructions of int64.
    """
    weight = exp32(score) * _LIMB
    upper = tl.floor(weight)
    return upper, tl.floor((weight - upper) * _LIMB)


@triton.jit
def mass_of_limbs(upper, lower):
    """Return the int64 of two sums of limbs."""
    return (upper.to(tl.int32).to(tl.int64) << _LIMB_BITS) + lower.to(tl.int32).to(tl.int64)
