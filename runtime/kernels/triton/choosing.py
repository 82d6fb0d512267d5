"""Which experts a token is sent to, and by what shares: the part of a kernel that whoever needs it computes by itself.

What is computed stands at `runahead.runtime.kernels.choice.Choice`. A program has a token. It finds the highest of its
experts, then the highest of those that are left, and so on: as many rounds as experts are chosen, whatever the scores
are. To compare every expert with every other takes about as long for 64 or 128 of them; for 512 that is a kernel of 750
KB in the place of one of 140 (docs/decisions/0036-experts.md).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from runahead.runtime.kernels.choice import LEAST_SUM, Choice

_NEVER = tl.constexpr(float("-inf"))
_LEAST_SUM = tl.constexpr(LEAST_SUM)
_BELOW_ALL = tl.constexpr(-(1 << 31))
_SIDE_BY_SIDE = tl.constexpr(128)  # values that the lanes of a warp hold, four each


@triton.jit
def _in_order(value):
    """Numbers that stand in the order of the values, int32, like `value`. No value may be NaN."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # there are two zeros
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # of negative ones the higher bits are further from zero


@triton.jit
def numbers_of_experts(PADDED: tl.constexpr, COPIES: tl.constexpr):
    """[n, COPIES, m], 0 to PADDED - 1 in each copy. As a compiler shares such a tensor out, a warp has a copy: the
    lanes of one hold m values side by side, and what is ahead of these is left to the others."""
    SIDE: tl.constexpr = PADDED if PADDED < _SIDE_BY_SIDE else _SIDE_BY_SIDE
    first = tl.arange(0, PADDED // SIDE)[:, None, None] * SIDE
    return first + tl.arange(0, SIDE)[None, None, :] + tl.zeros([1, COPIES, 1], tl.int32)


@triton.jit
def _most(x):
    """Of each copy, [1, COPIES, 1]."""
    return tl.max(tl.max(x, 2), 0)[None, :, None]


@triton.jit
def _sum(x):
    """Of each copy, [1, COPIES, 1]."""
    return tl.sum(tl.sum(x, 2), 0)[None, :, None]


@triton.jit
def of_first_copy(x, COPIES: tl.constexpr):
    """The sum of a copy. x: [n, COPIES, m]."""
    first = tl.arange(0, COPIES)[None, :, None] == 0
    return tl.sum(tl.sum(tl.sum(tl.where(first, x, 0), 2), 0), 0)


@triton.jit
def _highest(order, left, e):
    """The number of the expert that is ahead of all others that are left, of each copy: of equal ones the lowest. Two
    maxima of 32 bits, for each of which a warp has one instruction."""
    top = _most(tl.where(left, order, _BELOW_ALL))
    return -_most(tl.where(left & (order == top), -e, _BELOW_ALL))


@triton.jit
def _of_best_groups(
    value, COUNT: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
):  # fmt: skip
    """Whether an expert's group is among the best, [PADDED]. A group counts by the sum of its two highest values."""
    SIZE: tl.constexpr = COUNT // GROUPS
    e, g = tl.arange(0, PADDED)[None, :], tl.arange(0, PADDED_GROUPS)
    inside = e < COUNT
    mine = (e // SIZE == g[:, None]) & inside
    values = tl.where(mine, value[None, :], _NEVER)
    total = tl.max(values, 1)
    if SIZE > 1:
        first = tl.min(tl.where(mine & (values == total[:, None]), e, PADDED), 1)
        total += tl.max(tl.where(e == first[:, None], _NEVER, values), 1)
    total = tl.where((g < GROUPS) & (total == total), total, _NEVER)
    before = (total[None, :] == total[:, None]) & (g[None, :] < g[:, None])
    ahead = tl.sum(((total[None, :] > total[:, None]) | before).to(tl.int32), 1)
    return tl.sum((mine & (ahead < CHOSEN_GROUPS)[:, None]).to(tl.int32), 0) > 0


@triton.jit
def chosen_experts(
    scores, correction, token, COUNT: tl.constexpr, SCORES: tl.constexpr, CHOSEN: tl.constexpr, PADDED: tl.constexpr,
    RENORMALISED: tl.constexpr, LOGISTIC: tl.constexpr, CORRECTED: tl.constexpr, GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, FACTOR: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Which of COUNT experts a token is sent to, the place of each among its own, and the shares: of each expert, as
    `numbers_of_experts` has them.

    An expert is chosen if fewer than CHOSEN are ahead of it: those of higher scores, or values, and of equal ones those
    of lower numbers. A score that is no number is behind all others, and makes every share of its token one.
    SCORES: numbers of a token, of which the experts' scores come first. GROUPS: 0: any expert may be chosen. COPIES:
    with as many as the program has warps each warp has a copy, and none waits for another; 1 where there are groups.
    """
    e = numbers_of_experts(PADDED, COPIES)
    inside = e < COUNT
    row = scores + token.to(tl.int64) * SCORES
    score = tl.load(row + e, mask=inside, other=_NEVER)
    known = tl.where(score == score, score, _NEVER)
    if LOGISTIC:
        share = tl.where(inside, 1.0 / (1.0 + tl.exp(-score)), 0.0)
    else:
        share = tl.where(inside, tl.exp(score - _most(known)), 0.0)
        share = share / _sum(share)
    value = known
    if (LOGISTIC or CORRECTED) or GROUPS > 0:
        value = share
        if CORRECTED:
            value += tl.load(correction + e, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside & (value == value), value, _NEVER)
    if GROUPS > 0:
        tl.static_assert(COPIES == 1)
        kept = _of_best_groups(tl.reshape(value, [PADDED]), COUNT, PADDED, GROUPS, PADDED_GROUPS, CHOSEN_GROUPS)
        value = tl.where(tl.reshape(kept, e.shape), value, _NEVER)
    order = _in_order(value)
    left = inside
    for _ in range(CHOSEN):
        left = left & (e != _highest(order, left, e))
    chosen = inside & (left == 0)
    ones = chosen.to(tl.int32)
    before = tl.sum(ones, 2)
    before = tl.cumsum(before, 0) - before
    place = tl.cumsum(ones, 2) - 1 + before[:, :, None]
    if RENORMALISED:
        total = _sum(tl.where(chosen, share, 0.0))
        if LOGISTIC:
            total += _LEAST_SUM
        share = share / total
    if LOGISTIC:
        share = tl.where(_sum((score != score).to(tl.int32)) > 0, float("nan"), share)
    if FACTOR != 1.0:
        share = share * FACTOR
    return chosen, place, share


def padded(count: int) -> int:
    """Experts, as a program of `chosen_experts` takes them."""
    return max(1 << (count - 1).bit_length(), 16)


def choice_parts(choice: Choice, count: int, scores: int, copies: int = 1) -> dict[str, Any]:
    """What `chosen_experts` is made for, by name. count: experts. scores: numbers of a token. copies: where the choice
    has no groups."""
    groups = choice.groups if choice.limits_groups else 0
    return {
        "COUNT": count,
        "SCORES": scores,
        "CHOSEN": choice.chosen,
        "PADDED": padded(count),
        "RENORMALISED": choice.renormalised,
        "LOGISTIC": choice.scoring == "logistic",
        "CORRECTED": choice.correction is not None,
        "GROUPS": groups,
        "PADDED_GROUPS": triton.next_power_of_2(max(groups, 1)),
        "CHOSEN_GROUPS": choice.chosen_groups if groups else 0,
        "FACTOR": choice.scale,
        "COPIES": 1 if groups else copies,
    }
