"""Counter-based random numbers: Philox4x32-10, and its conversion to uniform and Gumbel numbers, bit by bit.

Only operations with one IEEE 754 rounding are used (add, subtract, multiply, divide, integer arithmetic), without fused
multiply-add. So a number depends on its arguments only, not on its array, the vector width, threads, the library or the
device.

Philox: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.rounding import ceil_div

U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS: Final = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)

# ln 2 in two parts. The first has 16 significant bits, so its product with any exponent is exact.
LN2_HIGH: Final = float.fromhex("0x1.62e4p-1")
LN2_LOW: Final = float.fromhex("0x1.7f7d1cp-20")
LOG2_E: Final = float.fromhex("0x1.715476p+0")
SQRT_HALF_BITS: Final = 0x3F3504F3  # the float32 nearest to the square root of 1/2
EXP_LOWEST: Final = -87.0  # below it `exp32` is 0

# Bound, with a large margin, of the error of `approximate_gumbel`.
APPROXIMATION_ERROR: Final = 1e-4


def philox4x32(counter: tuple[U64, U64, U64, U64], key: tuple[U64, U64]) -> tuple[U64, U64, U64, U64]:
    """Compute ten rounds of Philox4x32.

    counter, key: 32-bit words in uint64 arrays with broadcastable shapes. Words shared by many counters may have length
    1, which makes the first rounds cheap. Returns the four output words, each below 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _HALF) ^ (c1 ^ k0), product1 & _LOW
        c2, c3 = (product0 >> _HALF) ^ (c3 ^ k1), product0 & _LOW
        k0 = (k0 + _KEY_STEPS[0]) & _LOW
        k1 = (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def seed_words(seed: NDArray[np.int64]) -> tuple[U64, U64]:
    """Split 64-bit seeds into a Philox key: low and high words. They have the shape of `seed`."""
    bits = seed.astype(np.int64).view(np.uint64)
    return bits & _LOW, bits >> _HALF


def row_words(
    seed: NDArray[np.int64], position: NDArray[np.int64], vocab_size: int, first_block: int = 0
) -> NDArray[np.uint32]:
    """Return the random word of every vocabulary entry, for one position of several requests.

    seed, position: [rows]. first_block: entries from 4 * first_block on. Returns [rows, 4 * ceil(vocab_size / 4)]; word
    v is output v % 4 of counter (position, first_block + v // 4, 0, 0).
    """
    k0, k1 = seed_words(seed[:, None])
    blocks = np.arange(first_block, first_block + ceil_div(vocab_size, 4), dtype=np.uint64)[None, :]
    zero = np.zeros((1, 1), np.uint64)
    words = np.empty((seed.shape[0], blocks.shape[1], 4), np.uint32)
    for index, word in enumerate(philox4x32((position[:, None].astype(np.uint64), blocks, zero, zero), (k0, k1))):
        words[:, :, index] = word
    return words.reshape(seed.shape[0], -1)


def token_words(seed: NDArray[np.int64], position: NDArray[np.int64], token: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return the random words of single vocabulary entries, equal to `row_words`.

    seed, position, token: [n]. Returns [n].
    """
    zero = np.zeros(1, np.uint64)
    outputs = philox4x32((position.astype(np.uint64), (token // 4).astype(np.uint64), zero, zero), seed_words(seed))
    chosen = np.choose(token % 4, outputs)
    return chosen.astype(np.uint32)


def uniform(words: NDArray[np.uint32]) -> F32:
    """Convert words to uniform numbers strictly between 0 and 1, symmetric around 1/2: 2**23 values, each exact in
    float32.
    """
    return ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def gumbel(words: NDArray[np.uint32]) -> F32:
    """Convert words to standard Gumbel noise, -log(-log(u)), between -2.82 and 16.64."""
    return -log32(-log32(uniform(words)))


def approximate_gumbel(words: NDArray[np.uint32]) -> F32:
    """Compute `gumbel` with the library's logarithm, several times faster, within APPROXIMATION_ERROR and without
    reproducible bits.
    """
    u = uniform(words)
    np.log(u, out=u)
    np.negative(u, out=u)
    np.log(u, out=u)
    np.negative(u, out=u)
    return u


def log32(x: F32) -> F32:
    """Compute the natural logarithm of positive normal float32 numbers, within 3 ulp.

    x = 2**e * m with m in [sqrt(1/2), sqrt(2)); log(m) = 2 artanh(s), s = (m - 1) / (m + 1), by its Taylor series: s *
    s is below 0.03, so five terms give float32 precision.
    """
    bits = x.view(np.int32)
    exponent = (bits - np.int32(SQRT_HALF_BITS)) >> np.int32(23)
    f = (bits - (exponent << np.int32(23))).view(np.float32) - np.float32(1.0)
    e = exponent.astype(np.float32)
    s = f / (f + np.float32(2.0))
    s2 = s * s
    series = s2 * np.float32(2 / 9) + np.float32(2 / 7)
    series = s2 * series + np.float32(2 / 5)
    series = s2 * series + np.float32(2 / 3)
    log_m = (s + s) + (s * s2) * series
    result: F32 = e * np.float32(LN2_HIGH) + (e * np.float32(LN2_LOW) + log_m)
    return result


def exp32(x: F32) -> F32:
    """Compute e**x of float32 numbers that are zero, negative or -inf, within 3 ulp; 0 below EXP_LOWEST.

    x = n ln 2 + r with |r| below 0.35; e**r by its Taylor series up to r**7.
    """
    clamped = np.maximum(x, np.float32(EXP_LOWEST))
    n = np.floor(clamped * np.float32(LOG2_E) + np.float32(0.5))
    r = (clamped - n * np.float32(LN2_HIGH)) - n * np.float32(LN2_LOW)
    series = r * np.float32(1 / 5040) + np.float32(1 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        series *= r
        series += np.float32(coefficient)
    scale = ((n.astype(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)
    result: F32 = series * scale
    result[x < np.float32(EXP_LOWEST)] = 0.0
    return result
