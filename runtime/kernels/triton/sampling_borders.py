"""The border of top-k and top-p on the device: the counterpart of `reference.sampling_filters.kept_tokens`.

A score is zero or negative, so that its bits without the sign are an integer, its *key*, which rises as the score
falls. A row's border is a key and an id: what is left has a lower key, or that key and an id up to that one. It is the
first place in the order of keys, equal ones by id, where the *amount* of the tokens so far reaches a target: for top-k
their number, for top-p their probability mass. Amounts are sums of integers, which no order of summation changes.

1. `guess_kernel` estimates from a sample the amounts up to a ladder of scores.
2. `bracket_kernel` takes the exact amounts up to a few keys close to where the guess says the border is; and once more,
   between two of these keys, where many tokens are between them.
3. `draw_kernel` lists the tokens between the two keys that have the border between them.
4. `border_of_row` finds the border in that list, with one program a row.

Where an estimate is bad the list is long, at worst the whole vocabulary; the border is the same.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.sampling_brackets import (
    NO_KEY,
    WORST_KEY,
    bracket_of_row,
    key_of,
    mass_of,
    target_of_share,
)
from runahead.runtime.kernels.triton.sampling_rows import NO_TOKEN, has_limit, heat_of, limit_of, share_of


@triton.jit
def listed_tokens(listed, start, length, source, peak, heat, border, last, BLOCK: tl.constexpr):
    """Of a block of a row's list: which entries there are, their ids, scores and keys.

    The key of what is no entry, or what the border (border, last) does not leave, is above all others.
    """
    e = start + tl.arange(0, BLOCK)
    i = tl.load(listed + e, mask=e < length, other=0)
    x = tl.load(source + i, mask=e < length, other=float("-inf"))
    score = tl.div_rn(x - peak, heat + tl.zeros_like(x))
    key = key_of(score)
    counts = (e < length) & ((key < border) | ((key == border) & (i <= last)))
    return i, score, tl.where(counts, key, NO_KEY)


@triton.jit
def _amount(score, key, by_count):
    """What each entry adds to the amount."""
    return tl.where(key == NO_KEY, 0, tl.where(by_count, 1, mass_of(score)))


@triton.jit
def _search(
    listed,
    length,
    source,
    peak,
    heat,
    by_count,
    target,
    low,
    high,
    amount_low,
    amount_high,
    between,
    border,
    last,
    BLOCK: tl.constexpr,
):
    """The border of the tokens of a list that (border, last) leaves: where their amount reaches the target.

    Up to `low` the amount is `amount_low`, less than the target; up to `high` it is `amount_high`, and `between` tokens
    more. Each second step halves the bracket, the others guess. It ends where one token or one key is between them.
    """
    i, score, key = listed_tokens(listed, 0, length, source, peak, heat, border, last, BLOCK)
    each = _amount(score, key, by_count)  # of the first block, which most lists are no longer than
    guess = tl.full([], 1, tl.int32)
    while (between > 1) & (high - low > 1):
        part = (target - amount_low).to(tl.float32) / (amount_high - amount_low).to(tl.float32)
        step = tl.where(guess != 0, (part * (high - low).to(tl.float32)).to(tl.int32), (high - low) // 2)
        middle = low + tl.minimum(tl.maximum(step, 1), high - low - 1)
        within = (key > low) & (key <= middle)
        tokens = tl.sum(within.to(tl.int32), 0)
        amount = amount_low + tl.sum(tl.where(within, each, 0), 0)
        for start in range(BLOCK, length, BLOCK):
            _, far_score, far_key = listed_tokens(listed, start, length, source, peak, heat, border, last, BLOCK)
            far_within = (far_key > low) & (far_key <= middle)
            tokens += tl.sum(far_within.to(tl.int32), 0)
            amount += tl.sum(tl.where(far_within, _amount(far_score, far_key, by_count), 0), 0)
        enough = amount >= target
        between = tl.where(enough, tokens, between - tokens)
        high = tl.where(enough, middle, high)
        amount_high = tl.where(enough, amount, amount_high)
        low = tl.where(enough, low, middle)
        amount_low = tl.where(enough, amount_low, amount)
        guess = 1 - guess
    found = tl.full([], NO_TOKEN, tl.int32)
    if between > 1:  # equal keys, so equal amounts; the list is in the order of ids
        tied = (amount_high - amount_low) // between
        number = ((target - amount_low + tied - 1) // tied).to(tl.int32)
        seen = tl.full([], 0, tl.int32)
        for start in range(0, length, BLOCK):
            i, _, key = listed_tokens(listed, start, length, source, peak, heat, border, last, BLOCK)
            equal = (key == high).to(tl.int32)
            place = tl.cumsum(equal, 0) + seen
            found = tl.minimum(found, tl.min(tl.where((equal != 0) & (place == number), i, NO_TOKEN), 0))
            seen += tl.sum(equal, 0)
    return high, found


@triton.jit
def _mass_of_list(listed, length, source, peak, heat, border, last, BLOCK: tl.constexpr):
    """The mass of the tokens of a list that (border, last) leaves."""
    mass = tl.full([], 0, tl.int64)
    for start in range(0, length, BLOCK):
        _, score, key = listed_tokens(listed, start, length, source, peak, heat, border, last, BLOCK)
        mass += tl.sum(_amount(score, key, False), 0)
    return mass


@triton.jit
def border_of_row(
    sums,
    keys,
    listed,
    row,
    slot,
    parameters,
    source,
    peak,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's border, a key and an id, and the length of its list."""
    low, high, amount_low, amount_high, target, of_tiles = bracket_of_row(
        sums, keys, row, slot, parameters, VOCAB, TILES, TILES_PAD
    )
    length = tl.sum(of_tiles, 0)
    heat = heat_of(slot, parameters)
    limited = has_limit(slot, parameters, VOCAB)
    border, last = _search(
        listed, length, source, peak, heat, limited, target, low, high, amount_low, amount_high, length,
        WORST_KEY, NO_TOKEN, BLOCK,
    )  # fmt: skip
    share = share_of(slot, parameters)
    if limited & (share < 1.0):
        total = _mass_of_list(listed, length, source, peak, heat, border, last, BLOCK)
        first = tl.full([], -1, tl.int32)
        nothing = tl.full([], 0, tl.int64)
        key, token = _search(
            listed, length, source, peak, heat, False, target_of_share(share, total), first, border, nothing, total,
            limit_of(slot, parameters), border, last, BLOCK,
        )  # fmt: skip
        last = tl.where(key == border, tl.minimum(token, last), token)
        border = key
    return border, last, length
