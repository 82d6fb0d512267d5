"""Which experts a token is sent to, and by what shares: the part of a kernel that whoever needs it computes by itself.

What is computed stands at `runahead.runtime.kernels.choice.Choice`. A program has a token; its experts' numbers are
compared with each other, some at a time, since a place in an order is how many are ahead. So no sort and no number of
rounds hangs on what the scores are.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

from runahead.runtime.kernels.choice import LEAST_SUM, Choice

COMPARED: Final = 32  # numbers that every other is compared with at a time: nothing was measured
_NEVER = tl.constexpr(float("-inf"))
_LEAST_SUM = tl.constexpr(LEAST_SUM)


@triton.jit
def _ahead(value, PADDED: tl.constexpr, COMPARED: tl.constexpr, SIZE: tl.constexpr):
    """How many are ahead of each value, [PADDED]: the higher ones, and of equal ones those of lower numbers. SIZE: only
    those in the same group of so many count; 0: all do."""
    e = tl.arange(0, PADDED)
    ahead = tl.zeros([PADDED], tl.int32)
    for first in range(0, PADDED, COMPARED):
        o = first + tl.arange(0, COMPARED)
        # The value of each of these numbers, bit by bit: it is added to zeros.
        other = tl.sum(tl.where(e[:, None] == o[None, :], value[:, None], 0.0), 0)[None, :]
        before = (other == value[:, None]) & (o[None, :] < e[:, None])
        counts = (other > value[:, None]) | before
        if SIZE > 0:
            counts = counts & (o[None, :] // SIZE == e[:, None] // SIZE)
        ahead += tl.sum(counts.to(tl.int32), 1)
    return ahead


@triton.jit
def _of_best_groups(
    value, COUNT: tl.constexpr, PADDED: tl.constexpr, COMPARED: tl.constexpr, GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr,
):  # fmt: skip
    """Whether an expert's group is among the best, [PADDED]. A group counts by the sum of its two highest values."""
    SIZE: tl.constexpr = COUNT // GROUPS
    e, g = tl.arange(0, PADDED), tl.arange(0, PADDED_GROUPS)
    inside = e < COUNT
    best = (_ahead(value, PADDED, COMPARED, SIZE) < 2) & inside
    mine = (e // SIZE)[None, :] == g[:, None]
    total = tl.sum(tl.where(mine & best[None, :], value[None, :], 0.0), 1)
    total = tl.where((g < GROUPS) & (total == total), total, _NEVER)
    before = (total[None, :] == total[:, None]) & (g[None, :] < g[:, None])
    ahead = tl.sum(((total[None, :] > total[:, None]) | before).to(tl.int32), 1)
    return inside & (tl.sum((mine & (ahead < CHOSEN_GROUPS)[:, None]).to(tl.int32), 0) > 0)


@triton.jit
def chosen_experts(
    scores, correction, token, COUNT: tl.constexpr, CHOSEN: tl.constexpr, PADDED: tl.constexpr, COMPARED: tl.constexpr,
    RENORMALISED: tl.constexpr, LOGISTIC: tl.constexpr, CORRECTED: tl.constexpr, GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Which of COUNT experts a token is sent to, the place of each among its own, and the shares; all [PADDED].

    An expert is chosen if fewer than CHOSEN are ahead of it: those of higher scores, or values, and of equal ones those
    of lower numbers. A score that is no number is behind all others, and makes every share of its token one.
    GROUPS: 0: any expert may be chosen.
    """
    e = tl.arange(0, PADDED)
    inside = e < COUNT
    row = scores + token.to(tl.int64) * COUNT
    score = tl.load(row + e, mask=inside, other=_NEVER)
    known = tl.where(score == score, score, _NEVER)
    if LOGISTIC:
        share = tl.where(inside, 1.0 / (1.0 + tl.exp(-score)), 0.0)
    else:
        share = tl.where(inside, tl.exp(score - tl.max(known, 0)), 0.0)
        share = share / tl.sum(share, 0)
    if (LOGISTIC or CORRECTED) or GROUPS > 0:
        value = share
        if CORRECTED:
            value += tl.load(correction + e, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside & (value == value), value, _NEVER)
        if GROUPS > 0:
            kept = _of_best_groups(value, COUNT, PADDED, COMPARED, GROUPS, PADDED_GROUPS, CHOSEN_GROUPS)
            value = tl.where(kept, value, _NEVER)
        ahead = _ahead(value, PADDED, COMPARED, 0)
    else:
        ahead = tl.zeros([PADDED], tl.int32)
        for first in tl.static_range(0, PADDED, COMPARED):
            o = first + tl.arange(0, COMPARED)
            other = tl.load(row + o, mask=o < COUNT, other=_NEVER)
            other = tl.where(other == other, other, _NEVER)[None, :]
            before = (other == known[:, None]) & (o[None, :] < e[:, None])
            ahead += tl.sum(((other > known[:, None]) | before).to(tl.int32), 1)
    chosen = (ahead < CHOSEN) & inside
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


def choice_parts(choice: Choice, count: int, compared: int = COMPARED) -> dict[str, Any]:
    """What `chosen_experts` is made for, by name. count: experts. compared: numbers that every other is compared with
    at a time, a power of two; no result hangs on it."""
    groups = choice.groups if choice.limits_groups else 0
    return {
        "COUNT": count,
        "CHOSEN": choice.chosen,
        "PADDED": padded(count),
        "COMPARED": min(padded(count), compared),
        "RENORMALISED": choice.renormalised,
        "LOGISTIC": choice.scoring == "logistic",
        "CORRECTED": choice.correction is not None,
        "GROUPS": groups,
        "PADDED_GROUPS": triton.next_power_of_2(max(groups, 1)),
        "CHOSEN_GROUPS": choice.chosen_groups if groups else 0,
        "FACTOR": choice.scale,
    }
