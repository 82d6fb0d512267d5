"""The threshold of top-k and top-p on the device, the counterpart of `reference.sampling_filters.kept_tokens`.

A score is zero or negative, so its bits without the sign are an integer, its *key*, which rises as the score falls. A
row's threshold is a key and an id: kept tokens have a lower key, or that key and at most that id. It is the first entry
in the order of keys, ties by id, at which the cumulative *amount* reaches a target: for top-k the number of tokens, for
top-p their probability mass. Amounts are integer sums, independent of order.

1. `guess_kernel` estimates from a sample the amounts up to a ladder of scores.
2. `bracket_kernel` computes exact amounts up to a few keys near the estimate; and again between two of these keys if
   many tokens are between them.
3. `draw_kernel` lists the tokens between the two keys around the threshold, tile by tile.
4. `threshold_of_row` finds the threshold in that list, one program a row.

A bad estimate only makes the list longer, at worst the whole vocabulary.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.sampling.parameters import NO_TOKEN, has_top_k, top_k_of, top_p_of
from runahead.runtime.kernels.triton.sampling.scores import NO_KEY, WORST_KEY, key_of, mass_of, scores_of
from runahead.runtime.kernels.triton.sampling.threshold_bracket import top_p_target


@triton.jit
def listed_tokens(tokens, start, scoring, SIZES: tl.constexpr):
    """Load a block of a row's list: ids, scores and keys; invalid entries get a key above all others.

    tokens: the pointer to the list; int32 [TILES_PAD] the number of listed tokens before each tile, all after the last
    one; the list's length. scoring: the pointer to the row's logits, their peak, the temperature, its inverse.
    """
    BLOCK: tl.constexpr = SIZES.BLOCK
    TILES_PAD: tl.constexpr = SIZES.TILES_PAD
    listed, begins, length = tokens
    source, peak, temperature, inverse = scoring
    e = start + tl.arange(0, BLOCK)
    tile = tl.zeros([BLOCK], tl.int32)  # the last tile that begins at or before this entry
    for halvings in tl.static_range(1, 20):
        if TILES_PAD >> halvings > 0:
            middle = tile + (TILES_PAD >> halvings)
            tile = tl.where(tl.gather(begins, middle, 0) <= e, middle, tile)
    index = tile * SIZES.TILE + e - tl.gather(begins, tile, 0)
    i = tl.load(listed + index, mask=e < length, other=0)
    x = tl.load(source + i, mask=e < length, other=float("-inf"))
    score = scores_of(x, peak, temperature, inverse)
    return i, score, tl.where(e < length, key_of(score), NO_KEY)


@triton.jit
def keys_left(i, key, threshold, last):
    """Return tokens' keys, above all others if the threshold (threshold, last) drops the token."""
    return tl.where((key < threshold) | ((key == threshold) & (i <= last)), key, NO_KEY)


@triton.jit
def _amount(score, key, by_count):
    """Return each entry's contribution to the amount."""
    return tl.where(key == NO_KEY, 0, tl.where(by_count, 1, mass_of(score)))


@triton.jit
def _up_to_two(key, each, low, first, second):
    """Count the tokens above the key `low` and up to each of two keys, and sum their amounts."""
    up_to_first = (key > low) & (key <= first)
    up_to_second = (key > low) & (key <= second)
    tokens = tl.sum(up_to_first.to(tl.int32) + (up_to_second.to(tl.int32) << 16), 0)
    amounts = tl.sum(tl.join(tl.where(up_to_first, each, 0), tl.where(up_to_second, each, 0)), 0)
    amount_first, amount_second = tl.split(amounts)
    return tokens & 0xFFFF, tokens >> 16, amount_first, amount_second


@triton.jit
def _search(
    i, score, key, tokens, scoring, by_count, target, low, high, amount_low, amount_high, between, threshold, last,
    SIZES: tl.constexpr,
):  # fmt: skip
    """Find the threshold among a list's tokens that (threshold, last) keeps: where their amount reaches the target. i,
    score, key: the list's first block, which is usually the whole list.

    Up to `low` the amount is `amount_low`, less than the target; up to `high` it is `amount_high`, with `between` more
    tokens. Every second step trisects the bracket; the others interpolate and compute the amounts just before and after
    the guess. Ends when one token or one key is left.
    """
    length = tokens[2]
    first_key = keys_left(i, key, threshold, last)
    each = _amount(score, first_key, by_count)
    guess = tl.full([], 1, tl.int32)
    while (between > 1) & (high - low > 1):
        part = (target - amount_low).to(tl.float32) / (amount_high - amount_low).to(tl.float32)
        span = high - low
        center = tl.where(guess != 0, (part * span.to(tl.float32)).to(tl.int32), span // 2)
        aside = tl.where(guess != 0, span // 16, span // 6)
        first = low + tl.minimum(tl.maximum(center - aside, 1), span - 1)
        second = low + tl.minimum(tl.maximum(center + aside, 1), span - 1)
        tokens_first, tokens_second, amount_first, amount_second = _up_to_two(first_key, each, low, first, second)
        for start in range(SIZES.BLOCK, length, SIZES.BLOCK):
            far, far_score, far_key = listed_tokens(tokens, start, scoring, SIZES)
            far_key = keys_left(far, far_key, threshold, last)
            more_first, more_second, further_first, further_second = _up_to_two(
                far_key, _amount(far_score, far_key, by_count), low, first, second
            )
            tokens_first += more_first
            tokens_second += more_second
            amount_first += further_first
            amount_second += further_second
        amount_first += amount_low
        amount_second += amount_low
        before_first, before_second = amount_first >= target, amount_second >= target
        between = tl.where(
            before_first, tokens_first, tl.where(before_second, tokens_second - tokens_first, between - tokens_second)
        )
        high = tl.where(before_first, first, tl.where(before_second, second, high))
        amount_high = tl.where(before_first, amount_first, tl.where(before_second, amount_second, amount_high))
        low = tl.where(before_first, low, tl.where(before_second, first, second))
        amount_low = tl.where(before_first, amount_low, tl.where(before_second, amount_first, amount_second))
        guess = 1 - guess
    found = tl.full([], NO_TOKEN, tl.int32)
    if between > 1:  # equal keys have equal amounts; the list is ordered by id
        tied = (amount_high - amount_low) // between
        number = ((target - amount_low + tied - 1) // tied).to(tl.int32)
        seen = tl.full([], 0, tl.int32)
        for start in range(0, length, SIZES.BLOCK):
            i, _, key = listed_tokens(tokens, start, scoring, SIZES)
            equal = (keys_left(i, key, threshold, last) == high).to(tl.int32)
            index = tl.cumsum(equal, 0) + seen
            found = tl.minimum(found, tl.min(tl.where((equal != 0) & (index == number), i, NO_TOKEN), 0))
            seen += tl.sum(equal, 0)
    return high, found


@triton.jit
def threshold_of_row(i, score, key, bracket, tokens, slot, parameters, scoring, SIZES: tl.constexpr):
    """Find a row's threshold, a key and an id. The first three arguments are the list's first block. bracket:
    `bracket_of_row`'s results. tokens, scoring: as `listed_tokens` has them.
    """
    low, high, amount_low, amount_high, target = bracket
    length = tokens[2]
    by_count = has_top_k(slot, parameters, SIZES.VOCAB)
    threshold, last = _search(
        i, score, key, tokens, scoring, by_count, target, low, high, amount_low, amount_high, length, WORST_KEY,
        NO_TOKEN, SIZES,
    )  # fmt: skip
    top_p = top_p_of(slot, parameters)
    if by_count & (top_p < 1.0):
        total = tl.full([], 0, tl.int64)
        for start in range(0, length, SIZES.BLOCK):
            far, far_score, far_key = listed_tokens(tokens, start, scoring, SIZES)
            total += tl.sum(_amount(far_score, keys_left(far, far_key, threshold, last), False), 0)
        first = tl.full([], -1, tl.int32)
        nothing = tl.full([], 0, tl.int64)
        new_threshold, token = _search(
            i, score, key, tokens, scoring, False, top_p_target(top_p, total), first, threshold, nothing, total,
            top_k_of(slot, parameters), threshold, last, SIZES,
        )  # fmt: skip
        last = tl.where(new_threshold == threshold, tl.minimum(token, last), token)
        threshold = new_threshold
    return threshold, last
