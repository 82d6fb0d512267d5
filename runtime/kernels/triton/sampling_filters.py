"""Penalties, bias, masks, top-k, top-p and min-p on the device: the counterpart of `reference.sampling_filters`.

Rows that ask for none of it leave every kernel here at once. A row's border is found by bisection over the bits of its
scores: scores are zero or negative, so that their bits without the sign are integers in descending order of score.
Counts and masses are sums of integers: no order of summation changes them, and the borders are those of the reference.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.reference.sampling_filters import MASS_ONE
from runahead.runtime.kernels.triton.penalties import penalize
from runahead.runtime.kernels.triton.philox import exp32
from runahead.runtime.kernels.triton.row_parameters import float_of, int_of, place_of
from runahead.runtime.kernels.triton.sampling_draw import NO_TOKEN, is_edited, is_filtered, row_peak

_TEMPERATURE = place_of("temperature")
_TOP_K = place_of("top_k")
_TOP_P = place_of("top_p")
_MIN_POSITION = place_of("min_position")
_BIAS_COUNT = place_of("bias_count")
_ALLOWED_WORDS = place_of("allowed_words")
mass_one = tl.constexpr(MASS_ONE)
_WORST_KEY = tl.constexpr(0x7F800000)  # of a score of -inf
_MASSLESS_KEY = tl.constexpr(0x41E00000)  # of a score of -28: from there on every mass is 0


@triton.jit
def mask_kernel(
    logits,
    logits_stride,
    logit_rows,
    slots,
    alive,
    seq_len,
    parameters,
    counts,
    in_prompt,
    allowed,
    mask_words,
    stop_ids,
    scores,
    lowest_allowed,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    MAX_STOP_IDS: tl.constexpr,
):
    """Copies a tile of the logits of an edited row to `scores`, penalised, -inf where a token may not be drawn.

    +inf where a penalty has left float32, masked or not: the row has failed.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (tl.load(alive + slot) != 0) & is_edited(slot, seq_len, parameters):
        i = tile * TILE + tl.arange(0, TILE)
        inside = i < VOCAB
        base = logits + tl.load(logit_rows + row).to(tl.int64) * logits_stride
        x = tl.load(base + i, mask=inside, other=float("-inf"))
        x = penalize(x, i, inside, slot, parameters, counts, in_prompt, mask_words, VOCAB)
        lost = (tl.abs(x) < float("inf")) == 0
        limited = int_of(parameters, slot, _ALLOWED_WORDS) > 0
        word = tl.load(allowed + slot * mask_words + i // 32, mask=inside & limited, other=0)
        permitted = ((word >> (i % 32)) & 1) != 0
        x = tl.where(permitted | (limited == 0), x, float("-inf"))
        tl.store(lowest_allowed + row * TILES + tile, tl.min(tl.where(permitted, i, NO_TOKEN), 0))
        below = tl.load(seq_len + slot) < int_of(parameters, slot, _MIN_POSITION)
        for index in range(0, tl.where(below, MAX_STOP_IDS, 0)):
            x = tl.where(i == tl.load(stop_ids + slot * MAX_STOP_IDS + index), float("-inf"), x)
        tl.store(scores + row * VOCAB + i, tl.where(lost, float("inf"), x), mask=inside)


@triton.jit
def bias_kernel(
    slots,
    alive,
    parameters,
    bias_ids,
    bias_values,
    scores,
    VOCAB: tl.constexpr,
    MAX_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds a row's bias to its masked logits in `scores`: what is masked stays so, +inf where a sum leaves float32."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if tl.load(alive + slot) != 0:
        count = int_of(parameters, slot, _BIAS_COUNT)
        for start in range(0, count, BLOCK):
            b = start + tl.arange(0, BLOCK)
            token = tl.load(bias_ids + slot * MAX_BIAS + b, mask=b < count, other=-1)
            inside = (token >= 0) & (token < VOCAB)
            value = tl.load(bias_values + slot * MAX_BIAS + b, mask=b < count, other=0.0)
            at = scores + row * VOCAB + token
            before = tl.load(at, mask=inside, other=0.0)
            after = before + value
            good = (tl.abs(after) < float("inf")) | (before == float("-inf"))
            tl.store(at, tl.where(good, after, float("inf")), mask=inside)


@triton.jit
def edited_scan_kernel(
    slots,
    alive,
    seq_len,
    parameters,
    scores,
    edited_max,
    edited_arg,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The highest logit of a tile of an edited row, and its id. +inf: the row has failed."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (tl.load(alive + slot) != 0) & is_edited(slot, seq_len, parameters):
        i = tile * TILE + tl.arange(0, TILE)
        x = tl.load(scores + row * VOCAB + i, mask=i < VOCAB, other=float("-inf"))
        peak = tl.max(x, 0)
        tl.store(edited_max + row * TILES + tile, peak)
        tl.store(edited_arg + row * TILES + tile, tl.min(tl.where(x == peak, i, NO_TOKEN), 0))


@triton.jit
def score_kernel(
    logits,
    logits_stride,
    logit_rows,
    slots,
    alive,
    seq_len,
    parameters,
    partial_max,
    edited_max,
    scores,
    weights,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Scores (0 for the most likely token) and weights e**score of a tile of a row that is filtered."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    heat = float_of(parameters, slot, _TEMPERATURE)
    if (tl.load(alive + slot) != 0) & (heat > 0.0) & is_filtered(slot, parameters, VOCAB):
        raw_peak = row_peak(partial_max, row, TILES, TILES_PAD)
        edited = is_edited(slot, seq_len, parameters)
        peak = raw_peak
        if edited:
            peak = row_peak(edited_max, row, TILES, TILES_PAD)
        if (raw_peak < float("inf")) & (tl.abs(peak) < float("inf")):
            i = tile * TILE + tl.arange(0, TILE)
            inside = i < VOCAB
            base = logits + tl.load(logit_rows + row).to(tl.int64) * logits_stride
            raw = tl.load(base + i, mask=inside & (edited == 0), other=float("-inf"))
            changed = tl.load(scores + row * VOCAB + i, mask=inside & edited, other=float("-inf"))
            x = tl.where(edited, changed, raw)
            score = tl.div_rn(x - peak, heat + tl.zeros_like(x))
            score = tl.where(score == 0.0, 0.0, score)  # one zero of two: keys are compared as bits
            tl.store(scores + row * VOCAB + i, score, mask=inside)
            tl.store(weights + row * VOCAB + i, exp32(score), mask=inside)


@triton.jit
def _count_and_mass(scores, weights, worst, border, last, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Number and mass of the tokens with a key up to `worst`, of those that (border, last) leaves."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, VOCAB, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < VOCAB
        key = tl.load(scores + i, mask=inside, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        kept = inside & (key <= worst) & ((key < border) | ((key == border) & (i <= last)))
        weight = tl.load(weights + i, mask=kept, other=0.0)
        count += kept.to(tl.int32)
        mass += (weight * mass_one).to(tl.int64)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _count(scores, worst, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Number of tokens with a key up to `worst`."""
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        i = start + tl.arange(0, BLOCK)
        key = tl.load(scores + i, mask=i < VOCAB, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        count += ((i < VOCAB) & (key <= worst)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _id_of_tie(scores, tied, number, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the `number`-th token, from 1, whose key is `tied`."""
    found = tl.full([], NO_TOKEN, tl.int32)
    seen = tl.full([], 0, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        i = start + tl.arange(0, BLOCK)
        key = tl.load(scores + i, mask=i < VOCAB, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        equal = ((i < VOCAB) & (key == tied)).to(tl.int32)
        place = tl.cumsum(equal, 0) + seen
        found = tl.minimum(found, tl.min(tl.where((equal != 0) & (place == number), i, NO_TOKEN), 0))
        seen += tl.sum(equal, 0)
    return found


@triton.jit
def cut_kernel(
    slots,
    alive,
    seq_len,
    parameters,
    partial_max,
    edited_max,
    all_scores,
    all_weights,
    cut_key,
    cut_id,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The border of a filtered row: what is left has a key below `cut_key`, or that key and an id up to `cut_id`."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    filtered = is_filtered(slot, parameters, VOCAB)
    if (tl.load(alive + slot) != 0) & (float_of(parameters, slot, _TEMPERATURE) > 0.0) & filtered:
        raw_peak = row_peak(partial_max, row, TILES, TILES_PAD)
        edited = is_edited(slot, seq_len, parameters)
        peak = raw_peak
        if edited:
            peak = row_peak(edited_max, row, TILES, TILES_PAD)
        if (raw_peak < float("inf")) & (tl.abs(peak) < float("inf")):
            scores = all_scores + row * VOCAB
            weights = all_weights + row * VOCAB
            key = tl.full([], _WORST_KEY, tl.int32)
            last = tl.full([], NO_TOKEN, tl.int32)
            k = int_of(parameters, slot, _TOP_K)
            if (k > 0) & (k < VOCAB):
                key, last = _top_k_cut(scores, k, VOCAB, BLOCK)
            share = float_of(parameters, slot, _TOP_P)
            if share < 1.0:
                key, last = _top_p_cut(scores, weights, share, key, last, VOCAB, BLOCK)
            tl.store(cut_key + row, key)
            tl.store(cut_id + row, last)


@triton.jit
def _top_k_cut(scores, k, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The border that leaves the k highest. Stops as soon as a border has exactly k tokens before it."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], _WORST_KEY, tl.int32)
    before = tl.full([], 0, tl.int32)  # tokens with a key below `low`: fewer than k
    within = tl.full([], VOCAB, tl.int32)  # tokens with a key up to `high`: at least k
    while (low < high) & (within != k):
        middle = low + (high - low) // 2
        count = _count(scores, middle, VOCAB, BLOCK)
        enough = count >= k
        high = tl.where(enough, middle, high)
        within = tl.where(enough, count, within)
        before = tl.where(enough, before, count)
        low = tl.where(enough, low, middle + 1)
    last = tl.full([], NO_TOKEN, tl.int32)
    if within != k:
        last = _id_of_tie(scores, high, k - before, VOCAB, BLOCK)
    return high, last


@triton.jit
def _top_p_cut(scores, weights, share, border, last, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The border that leaves the fewest tokens whose mass reaches `share` of what (border, last) leaves.

    Stops as soon as one token is between the borders: it is the last that is needed.
    """
    low = tl.full([], 0, tl.int32)
    high = tl.minimum(border, _MASSLESS_KEY)
    count_within, total = _count_and_mass(scores, weights, high, border, last, VOCAB, BLOCK)
    target = tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    target = tl.maximum(target, 1)  # the most likely token is left even if `share` is 0
    count_before = tl.full([], 0, tl.int32)
    mass_before = tl.full([], 0, tl.int64)  # of keys below `low`: less than the target
    mass_within = total  # of keys up to `high`: at least the target
    while (low < high) & (count_within - count_before > 1):
        middle = low + (high - low) // 2
        count, mass = _count_and_mass(scores, weights, middle, border, last, VOCAB, BLOCK)
        enough = mass >= target
        high = tl.where(enough, middle, high)
        count_within = tl.where(enough, count, count_within)
        mass_within = tl.where(enough, mass, mass_within)
        count_before = tl.where(enough, count_before, count)
        mass_before = tl.where(enough, mass_before, mass)
        low = tl.where(enough, low, middle + 1)
    cut = tl.where(high == border, last, NO_TOKEN)
    tied = count_within - count_before
    if tied > 1:  # equal scores, so equal masses
        each = (mass_within - mass_before) // tied
        needed = (target - mass_before + each - 1) // each
        cut = tl.minimum(cut, _id_of_tie(scores, high, needed.to(tl.int32), VOCAB, BLOCK))
    return high, cut
