"""Which experts a token is sent to, and by what shares: the part of a kernel that whoever needs it computes by itself.

What is computed stands at `runahead.runtime.kernels.choice.Choice`. A program has a token. It finds the highest of its
experts, then the highest below that, and so on: as many rounds as experts are chosen, whatever the scores are. To
compare every expert with every other takes about as long for 64 or 128 of them; for 512 that is a kernel of 750 KB in
the place of one of 140 (docs/decisions/0036-experts.md).
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
_NUMBERS = tl.constexpr(1 << 16)  # more than there are experts
_BELOW_ALL = tl.constexpr(-(1 << 62))


@triton.jit
def _orders(value, e):
    """Numbers that stand in the order of the values, int64, like `value`: of equal values the one of the lower `e` is
    ahead. No value may be NaN."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # there are two zeros
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # of negative ones the higher bits are further from zero
    return bits.to(tl.int64) * _NUMBERS + (_NUMBERS - 1 - e)


@triton.jit
def _of_best_groups(
    value, order, COUNT: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
):  # fmt: skip
    """Whether an expert's group is among the best, [PADDED]. A group counts by the sum of its two highest values."""
    SIZE: tl.constexpr = COUNT // GROUPS
    e, g = tl.arange(0, PADDED), tl.arange(0, PADDED_GROUPS)
    inside = e < COUNT
    mine = (e // SIZE)[None, :] == g[:, None]
    orders = tl.where(mine & inside[None, :], order[None, :], _BELOW_ALL)
    first = tl.max(orders, 1)
    second = tl.max(tl.where(orders < first[:, None], orders, _BELOW_ALL), 1)
    best = (orders >= second[:, None]) & (orders > _BELOW_ALL)
    total = tl.sum(tl.where(best, value[None, :], 0.0), 1)
    total = tl.where((g < GROUPS) & (total == total), total, _NEVER)
    before = (total[None, :] == total[:, None]) & (g[None, :] < g[:, None])
    ahead = tl.sum(((total[None, :] > total[:, None]) | before).to(tl.int32), 1)
    return inside & (tl.sum((mine & (ahead < CHOSEN_GROUPS)[:, None]).to(tl.int32), 0) > 0)


@triton.jit
def chosen_experts(
    scores, correction, token, COUNT: tl.constexpr, SCORES: tl.constexpr, CHOSEN: tl.constexpr, PADDED: tl.constexpr,
    RENORMALISED: tl.constexpr, LOGISTIC: tl.constexpr, CORRECTED: tl.constexpr, GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Which of COUNT experts a token is sent to, the place of each among its own, and the shares; all [PADDED].

    An expert is chosen if fewer than CHOSEN are ahead of it: those of higher scores, or values, and of equal ones those
    of lower numbers. A score that is no number is behind all others, and makes every share of its token one.
    SCORES: numbers of a token, of which the experts' scores come first. GROUPS: 0: any expert may be chosen.
    """
    e = tl.arange(0, PADDED)
    inside = e < COUNT
    row = scores + token.to(tl.int64) * SCORES
    score = tl.load(row + e, mask=inside, other=_NEVER)
    known = tl.where(score == score, score, _NEVER)
    if LOGISTIC:
        share = tl.where(inside, 1.0 / (1.0 + tl.exp(-score)), 0.0)
    else:
        share = tl.where(inside, tl.exp(score - tl.max(known, 0)), 0.0)
        share = share / tl.sum(share, 0)
    value = known
    if (LOGISTIC or CORRECTED) or GROUPS > 0:
        value = share
        if CORRECTED:
            value += tl.load(correction + e, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside & (value == value), value, _NEVER)
    order = _orders(value, e)
    if GROUPS > 0:
        kept = _of_best_groups(value, order, COUNT, PADDED, GROUPS, PADDED_GROUPS, CHOSEN_GROUPS)
        order = _orders(tl.where(kept, value, _NEVER), e)
    last = tl.max(order, 0)
    for _ in range(CHOSEN - 1):
        last = tl.max(tl.where(order < last, order, _BELOW_ALL), 0)
    chosen = (order >= last) & inside
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    if RENORMALISED:
        total = tl.sum(tl.where(chosen, share, 0.0), 0)
        if LOGISTIC:
            total += _LEAST_SUM
        share = share / total
    if LOGISTIC:
        share = tl.where(tl.sum((score != score).to(tl.int32), 0) > 0, float("nan"), share)
    if FACTOR != 1.0:
        share = share * FACTOR
    return chosen, place, share


def padded(count: int) -> int:
    """Experts, as a program of `chosen_experts` takes them."""
    return max(1 << (count - 1).bit_length(), 16)


def choice_parts(choice: Choice, count: int, scores: int) -> dict[str, Any]:
    """What `chosen_experts` is made for, by name. count: experts. scores: numbers of a token."""
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
    }
