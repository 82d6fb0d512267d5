"""Device functions that choose a token's experts and their routing weights (`runahead.runtime.kernels.choice.Choice`
defines both).

A program has one token or a few. Each round finds the highest value below the previous one; there is one round for each
chosen expert. A second pass resolves equal values. Comparing every expert with every other takes about as long for 64
or 128 experts, but for 512 the kernel has 750 KB instead of 140 (docs/decisions/0036-experts.md).

Values keep two dimensions throughout: a tensor that is reduced to one dimension and broadcast again moves between
threads through shared memory, with barriers.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl

from runahead.runtime.kernels.choice import LEAST_SUM, Choice

_NEVER = tl.constexpr(float("-inf"))
_LEAST_SUM = tl.constexpr(LEAST_SUM)
_BELOW_ALL = tl.constexpr(-(1 << 31))
_ABOVE_ALL = tl.constexpr((1 << 31) - 1)
_EXPONENT = tl.constexpr(0x7F800000)  # bits of a float32
_ROUNDER = tl.constexpr(1.5 * 2.0**12)
IN_COPIES: Final = 128  # experts of which each warp has a copy, at most: four of a lane


class ChoiceSizes(NamedTuple):
    """Constants of kernels that choose experts. PADDED, PADDED_GROUPS: rounded up to powers of two."""

    COUNT: int  # experts
    SCORES: int  # numbers of a token, of which the experts' scores come first
    CHOSEN: int  # experts of a token
    PADDED: int
    RENORMALISED: bool
    LOGISTIC: bool
    GROUPS: int  # 0: any expert may be chosen
    PADDED_GROUPS: int
    CHOSEN_GROUPS: int
    FACTOR: float  # of all routing weights
    # With at least one copy a warp, each warp has whole copies, and no warp waits for another in a round.
    COPIES: int


@triton.jit
def numbers_of_experts(PADDED: tl.constexpr, COPIES: tl.constexpr):
    """Return [COPIES, PADDED], 0 to PADDED - 1 in each copy. The compiler gives each warp one of several copies; a
    single copy is divided among all warps."""
    return tl.arange(0, PADDED)[None, :] + tl.zeros([COPIES, 1], tl.int32)


@triton.jit
def _exact_sum(x):
    """Sum non-negative numbers of each copy exactly, float32 [COPIES, 1]. They are added in float64 as multiples of
    2**-40 times the greatest number's power of two, so the result does not depend on the order."""
    power = (tl.max(x, 1, keep_dims=True).to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    rounder = power.to(tl.float64) * _ROUNDER  # adding and subtracting it leaves such multiples
    return tl.sum((x.to(tl.float64) + rounder) - rounder, 1, keep_dims=True).to(tl.float32)


@triton.jit
def _highest(order, e, CHOSEN: tl.constexpr):
    """Return whether each expert is among the CHOSEN highest of its copy; among equal ones the lowest `e` wins. order:
    int32, _BELOW_ALL for padding."""
    least = tl.max(order, 1, keep_dims=True)
    for _ in tl.static_range(CHOSEN - 1):
        least = tl.max(tl.where(order < least, order, _BELOW_ALL), 1, keep_dims=True)
    ahead = tl.sum((order > least).to(tl.int32), 1, keep_dims=True)
    last = tl.min(tl.where(order == least, e, _ABOVE_ALL), 1, keep_dims=True)
    if tl.max(tl.abs(ahead - (CHOSEN - 1))) > 0:  # some copy has equal numbers: `least` is too low
        while tl.max(ahead) >= CHOSEN:
            higher = tl.min(tl.where(order > least, order, _ABOVE_ALL), 1, keep_dims=True)
            least = tl.where(ahead >= CHOSEN, higher, least)
            ahead = tl.sum((order > least).to(tl.int32), 1, keep_dims=True)
        last = tl.min(tl.where(order == least, e, _ABOVE_ALL), 1, keep_dims=True)
        for known in range(tl.min(ahead) + 1, CHOSEN):
            further = tl.min(tl.where((order == least) & (e > last), e, _ABOVE_ALL), 1, keep_dims=True)
            last = tl.where(known > ahead, further, last)
    return (order > least) | ((order == least) & (e <= last))


@triton.jit
def _of_best_groups(value, CHOICE: tl.constexpr):
    """Return whether each expert's group is among the best, [PADDED], ranked by the sum of its two highest values."""
    SIZE: tl.constexpr = CHOICE.COUNT // CHOICE.GROUPS
    e, g = tl.arange(0, CHOICE.PADDED)[None, :], tl.arange(0, CHOICE.PADDED_GROUPS)
    inside = e < CHOICE.COUNT
    mine = (e // SIZE == g[:, None]) & inside
    values = tl.where(mine, value[None, :], _NEVER)
    total = tl.max(values, 1)
    if SIZE > 1:
        first = tl.min(tl.where(mine & (values == total[:, None]), e, CHOICE.PADDED), 1)
        total += tl.max(tl.where(e == first[:, None], _NEVER, values), 1)
    total = tl.where((g < CHOICE.GROUPS) & (total == total), total, _NEVER)
    before = (total[None, :] == total[:, None]) & (g[None, :] < g[:, None])
    ahead = tl.sum(((total[None, :] > total[:, None]) | before).to(tl.int32), 1)
    return tl.sum((mine & (ahead < CHOICE.CHOSEN_GROUPS)[:, None]).to(tl.int32), 0) > 0


@triton.jit
def _scores_to_weights(score, inside, LOGISTIC: tl.constexpr):
    """Return the weight of each expert: the softmax or the logistic function of the scores, float32, 0 outside."""
    if LOGISTIC:
        weight = tl.where(inside, 1.0 / (1.0 + tl.exp(-score)), 0.0)
    else:
        highest = tl.max(tl.where(score == score, score, _NEVER), 1, keep_dims=True)
        weight = tl.where(inside, tl.exp(score - highest), 0.0)
        weight = weight / _exact_sum(weight)
    return weight


@triton.jit
def chosen_experts(scores, correction, token, CHOICE: tl.constexpr):
    """Choose a token's experts. Returns whether each expert is chosen, its index among the token's experts, and its
    score, all shaped like `numbers_of_experts`.

    Experts rank by score, or by value where it decides, then by ascending number; NaN ranks last. correction: float32
    [COUNT] of the values, or None. token: one for all copies, or int32 [COPIES, 1].
    """
    e = numbers_of_experts(CHOICE.PADDED, CHOICE.COPIES)
    inside = e < CHOICE.COUNT
    score = tl.load(scores + token.to(tl.int64) * CHOICE.SCORES + e, mask=inside, other=_NEVER)
    value = score
    if (CHOICE.LOGISTIC or correction is not None) or CHOICE.GROUPS > 0:
        value = _scores_to_weights(score, inside, CHOICE.LOGISTIC)
        if correction is not None:
            value += tl.load(correction + e, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(value == value, value, _NEVER)
    if CHOICE.GROUPS > 0:
        tl.static_assert(CHOICE.COPIES == 1)
        kept = _of_best_groups(tl.reshape(value, [CHOICE.PADDED]), CHOICE)
        value = tl.where(tl.reshape(kept, e.shape), value, _NEVER)
    # Integers in the order of the values: the two zeros become one, and the bits of negative values are inverted.
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    order = tl.where(inside, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), _BELOW_ALL)
    chosen = _highest(order, e, CHOICE.CHOSEN)
    return chosen, tl.cumsum(chosen.to(tl.int32), 1) - 1, score


@triton.jit
def routing_weights_of(score, chosen, CHOICE: tl.constexpr):
    """Return the routing weight of each chosen expert. A NaN among a token's scores makes all of its weights NaN."""
    inside = numbers_of_experts(CHOICE.PADDED, CHOICE.COPIES) < CHOICE.COUNT
    weight = _scores_to_weights(score, inside, CHOICE.LOGISTIC)
    if CHOICE.RENORMALISED:
        total = _exact_sum(tl.where(chosen, weight, 0.0))
        if CHOICE.LOGISTIC:
            total += _LEAST_SUM
        weight = weight / total
    if CHOICE.LOGISTIC:
        weight = tl.where(tl.sum((score != score).to(tl.int32), 1, keep_dims=True) > 0, float("nan"), weight)
    if CHOICE.FACTOR != 1.0:
        weight = weight * CHOICE.FACTOR
    return weight


def padded(count: int) -> int:
    """Return the number of experts, padded for `chosen_experts`."""
    return max(1 << (count - 1).bit_length(), 16)


def choice_sizes(choice: Choice, count: int, scores: int, copies: int = 1) -> ChoiceSizes:
    """Return the constants of kernels that choose experts. count: experts. scores: numbers of a token. copies: number
    of warps or tokens; it becomes one with groups or more than IN_COPIES experts."""
    copies = copies if padded(count) <= IN_COPIES and not choice.limits_groups else 1
    groups = choice.groups if choice.limits_groups else 0
    return ChoiceSizes(
        COUNT=count,
        SCORES=scores,
        CHOSEN=choice.chosen,
        PADDED=padded(count),
        RENORMALISED=choice.renormalised,
        LOGISTIC=choice.scoring == "logistic",
        GROUPS=groups,
        PADDED_GROUPS=triton.next_power_of_2(max(groups, 1)),
        CHOSEN_GROUPS=choice.chosen_groups if groups else 0,
        FACTOR=choice.scale,
        COPIES=copies,
    )
