"""The exponential race that is equivalent to the highest score plus Gumbel noise.

A token with the uniform number u arrives at the time -log(u) * e**-score, so the first arrival has the highest score +
Gumbel noise. Noise costs two logarithms; cheaper bounds exclude most tokens without them. Approximations decide only
for which tokens exact noise is computed, so the token is the reference's.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.sampling.parameters import NO_TOKEN, has_top_k, min_p_of
from runahead.runtime.kernels.triton.sampling.philox import block_words, exp32, gumbel, uniform, word_of
from runahead.runtime.kernels.triton.sampling.scores import NO_KEY, key_of, mass_one, scores_of
from runahead.runtime.kernels.triton.sampling.threshold import keys_left

LOG2_E = tl.constexpr(1.4426950408889634)  # times 1 / temperature: from a logit's distance to powers of 2
_FARTHEST = tl.constexpr(100.0)  # distance in powers of 2 that no noise can make up for
_RESERVE = tl.constexpr(1.0 + 2e-4)  # ten times the possible rounding of times and scores
_PATIENCE = tl.constexpr(12.0)  # mean times to the first arrival, after which a race is run again
NEVER = tl.constexpr(1e30)
_FEW = tl.constexpr(4)  # tokens of a tile whose noise is computed one by one
_WORDS = tl.constexpr(2.0**-32)
_GRAIN = tl.constexpr(2.0**-23)  # spacing of uniform numbers


@triton.jit
def soonest_of_row(amount_low, slot, parameters, VOCAB: tl.constexpr):
    """Return a time before which the first token that is certainly kept arrives with a probability of 1 - e**-12.
    amount_low: the kept tokens' mass. With top-k or min-p, or without mass, the time is infinite.
    """
    known = (has_top_k(slot, parameters, VOCAB) == 0) & (min_p_of(slot, parameters) == 0.0)
    soon = _PATIENCE * mass_one / tl.maximum(amount_low, 1).to(tl.float32)
    return tl.where(known, tl.where(amount_low > 0, soon, NEVER), NEVER)


@triton.jit
def by_four(x, TILE: tl.constexpr):
    """Split a tile's tokens by id modulo 4: [TILE / 4] each. No data moves between threads."""
    even, odd = tl.split(x.reshape([TILE // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _in_turn(x0, x1, x2, x3, TILE: tl.constexpr):
    """Undo `by_four`: [TILE]."""
    return tl.join(tl.join(x0, x2), tl.join(x1, x3)).reshape([TILE])


@triton.jit
def may_arrive(distance, drawn, words, soonest, TILE: tl.constexpr):
    """Return which `drawn` tokens of a tile may arrive before `soonest`, as four tensors like `words`. distance: of a
    score to the highest, in powers of 2, negative.
    """
    reach = tl.where(drawn, tl.exp2(distance) * (soonest * _RESERVE) + _GRAIN, -1.0)
    r0, r1, r2, r3 = by_four(reach, TILE)
    return _missing(words[0]) <= r0, _missing(words[1]) <= r1, _missing(words[2]) <= r2, _missing(words[3]) <= r3


@triton.jit
def _missing(word):
    """Return (2**32 - word) / 2**32."""
    return (word ^ 0xFFFFFFFF).to(tl.float32) * _WORDS


@triton.jit
def first_of_tile(source, i, x, may, words, peak, temperature, log2_scale, seed, position, soonest, TILE: tl.constexpr):
    """Return a tile's highest score plus noise, its id, and the updated `soonest`.

    soonest: upper bound of the first arrival in earlier tiles. may: the result of `may_arrive`.

    -log(u) is at least 1 - u, which follows from the word: this decides which tokens may arrive before `soonest`. Exact
    noise is computed for those only, in most tiles for none. If there are many, as in the first tile of a race, a
    tighter bound leaves one or two: -log(u) exceeds 1 - u by a factor that follows from 1 - u.
    """
    may_be_first = _in_turn(may[0], may[1], may[2], may[3], TILE)
    left = tl.sum(may_be_first.to(tl.int32), 0)
    if left > _FEW:
        slowness = tl.exp2(tl.minimum((peak - x) * log2_scale, _FARTHEST))
        by_id = _in_turn(words[0], words[1], words[2], words[3], TILE)
        earliest = tl.where(may_be_first, (1.0 - uniform(by_id)) * slowness, float("inf"))
        first = tl.min(earliest, 0)
        least = first / tl.min(tl.where(may_be_first, slowness, float("inf")), 0)  # 1 - u of that token is no more
        factor = tl.where(least < 0.68, 1.0 + least, tl.where(least < 0.999, 7.0, 17.0))
        soonest = tl.minimum(soonest, first * factor)
        may_be_first = may_be_first & (earliest <= soonest * _RESERVE)
        left = tl.sum(may_be_first.to(tl.int32), 0)
    highest = tl.full([], float("-inf"), tl.float32)
    chosen = tl.full([], NO_TOKEN, tl.int32)
    for _ in range(0, left):
        token = tl.min(tl.where(may_be_first, i, NO_TOKEN), 0)
        may_be_first = may_be_first & (i != token)
        noisy = tl.div_rn(tl.load(source + token) - peak, temperature) + gumbel(word_of(seed, position, token))
        better = noisy > highest  # ids ascend: the first among ties stays
        highest = tl.where(better, noisy, highest)
        chosen = tl.where(better, token, chosen)
    return highest, chosen, tl.minimum(soonest, tl.exp(tl.minimum(-highest, 80.0)) * _RESERVE)


@triton.jit
def first_of_block(i, score, key, threshold, last, min_p, seed, position, highest, chosen):
    """Return the higher of `highest` and the highest score plus noise among these tokens after threshold and min-p, and
    its id, the lowest among ties. Exact noise is computed only if needed: see `first_of_tile`.
    """
    drawn = keys_left(i, key, threshold, last) != NO_KEY
    if min_p > 0.0:
        drawn = drawn & (exp32(score) >= min_p)
    word = word_of(seed, position, i)
    soonest = tl.exp(tl.minimum(-highest, 80.0)) * _RESERVE
    may_be_higher = drawn & (_missing(word) <= tl.exp(score) * soonest + _GRAIN)
    if tl.max(may_be_higher.to(tl.int32), 0) != 0:
        noisy = tl.where(may_be_higher, score + gumbel(word), float("-inf"))
        best = tl.max(noisy, 0)
        token = tl.min(tl.where(noisy == best, i, NO_TOKEN), 0)
        better = (best > highest) | ((best == highest) & (token < chosen))
        chosen = tl.where(better, token, chosen)
        highest = tl.maximum(best, highest)
    return highest, chosen


@triton.jit
def first_of_row(source, peak, temperature, inverse, low, seed, position, SIZES: tl.constexpr):
    """Return the highest score plus noise of a row's tokens up to a key, and its id, for a race without an arrival
    before its time limit.
    """
    highest = tl.full([], float("-inf"), tl.float32)
    chosen = tl.full([], NO_TOKEN, tl.int32)
    soonest = tl.full([], NEVER, tl.float32)
    log2_scale = tl.minimum(1.0 / temperature * LOG2_E, 3e38)
    VOCAB: tl.constexpr = SIZES.VOCAB
    TILE: tl.constexpr = SIZES.TILE
    for tile in range(0, SIZES.TILES):
        i = tile * TILE + tl.arange(0, TILE)
        x = tl.load(source + i, mask=i < VOCAB, other=float("-inf"))
        drawn = (i < VOCAB) & (key_of(scores_of(x, peak, temperature, inverse)) <= low)
        words = block_words(seed, position, tile * (TILE // 4) + tl.arange(0, TILE // 4))
        may = may_arrive((x - peak) * log2_scale, drawn, words, soonest, TILE)
        best, token, soonest = first_of_tile(
            source, i, x, may, words, peak, temperature, log2_scale, seed, position, soonest, TILE
        )  # fmt: skip
        chosen = tl.where(best > highest, token, chosen)
        highest = tl.maximum(best, highest)
    return highest, chosen
