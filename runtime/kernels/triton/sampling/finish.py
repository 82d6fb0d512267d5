"""Chooses each row's token from its tiles' best tokens and from the list of tokens near its threshold."""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.sampling.gumbel import NEVER, first_of_block, first_of_row, soonest_of_row
from runahead.runtime.kernels.triton.sampling.parameters import (
    DRAWS,
    EDITED,
    HAS_THRESHOLD,
    NO_TOKEN,
    has_grammar,
    logits_of_row,
    min_p_of,
    of_tiles,
    position_of,
    seed_of,
    temperature_of,
)
from runahead.runtime.kernels.triton.sampling.scores import inverse_of
from runahead.runtime.kernels.triton.sampling.threshold import listed_tokens, threshold_of_row
from runahead.runtime.kernels.triton.sampling.threshold_bracket import bracket_of_row


@triton.jit
def _first_of_highest(value, token):
    """Return the highest of a row's tiles and its id, the lowest id among ties. Both [TILES_PAD]."""
    highest = tl.max(value, 0)
    return highest, tl.min(tl.where(value == highest, token, NO_TOKEN), 0)


@triton.jit
def finish_kernel(
    rows, alive, state, buffers, width, FULL: tl.constexpr, VERIFIES: tl.constexpr, MASKED: tl.constexpr,
    SIZES: tl.constexpr,
):  # fmt: skip
    """Choose each row's token from its tiles, and from its list if it has a threshold. A row fails if a raw or changed
    logit is not finite. MASKED: also find whether a row with a grammar has any allowed token.
    """
    TILES: tl.constexpr = SIZES.TILES
    TILES_PAD: tl.constexpr = SIZES.TILES_PAD
    BLOCK: tl.constexpr = SIZES.BLOCK
    row = tl.program_id(0).to(tl.int64)
    # Issue all loads at once, though a row needs only some.
    slot = tl.load(rows.slots + row).to(tl.int64)
    kind = tl.load(buffers.kinds + row).to(tl.int32)
    raw_peaks = of_tiles(buffers.partial_max, row, float("-inf"), TILES, TILES_PAD)
    raw_tokens = of_tiles(buffers.partial_arg, row, NO_TOKEN, TILES, TILES_PAD)
    scores_drawn = of_tiles(buffers.best_score, row, float("-inf"), TILES, TILES_PAD)
    tokens_drawn = of_tiles(buffers.best_id, row, NO_TOKEN, TILES, TILES_PAD)
    edited_peaks, edited_tokens = raw_peaks, raw_tokens
    if FULL:
        edited_peaks = of_tiles(buffers.edited_max, row, float("-inf"), TILES, TILES_PAD)
        edited_tokens = of_tiles(buffers.edited_arg, row, NO_TOKEN, TILES, TILES_PAD)
    token = tl.full([], 0, tl.int32)
    is_finite = tl.full([], 1, tl.int32)
    is_nothing_left = tl.full([], 0, tl.int32)
    if tl.load(alive + slot) != 0:
        peak = tl.max(raw_peaks, 0)
        edited = FULL & ((kind & EDITED) != 0)
        if MASKED:
            lowest = tl.min(of_tiles(buffers.lowest_allowed, row, NO_TOKEN, TILES, TILES_PAD), 0)
            empty = edited & (peak < float("inf")) & has_grammar(slot, state.parameters) & (lowest == NO_TOKEN)
            is_nothing_left = empty.to(tl.int32)
        if edited & (peak < float("inf")):
            peak = tl.max(edited_peaks, 0)
        if is_nothing_left != 0:
            tl.store(buffers.partial_max + row * TILES, float("inf"))  # as below
        elif peak == float("inf"):
            is_finite = tl.full([], 0, tl.int32)
            tl.store(buffers.partial_max + row * TILES, peak)  # it has no log-probabilities either
        elif peak == float("-inf"):
            lowest = tl.min(of_tiles(buffers.lowest_allowed, row, NO_TOKEN, TILES, TILES_PAD), 0)
            token = tl.where(lowest == NO_TOKEN, 0, lowest)
        elif (kind & DRAWS) != 0:
            highest, token = _first_of_highest(scores_drawn, tokens_drawn)
            if FULL & ((kind & HAS_THRESHOLD) != 0):
                source = logits_of_row(rows, row)
                if edited:
                    source = buffers.edited_logits + row * SIZES.VOCAB
                temperature, seed = temperature_of(slot, state.parameters), seed_of(slot, state.parameters)
                position = position_of(state.seq_len, slot, row, width, VERIFIES)
                inverse = inverse_of(temperature, peak)
                bracket = bracket_of_row(buffers, row, slot, state.parameters, SIZES)
                low, amount_low = bracket[0], bracket[2]
                watched = soonest_of_row(amount_low, slot, state.parameters, SIZES.VOCAB) < NEVER
                if watched & (highest == float("-inf")):
                    highest, token = first_of_row(source, peak, temperature, inverse, low, seed, position, SIZES)
                lengths = of_tiles(buffers.list_lengths, row, 0, TILES, TILES_PAD)
                begins, length = tl.cumsum(lengths, 0) - lengths, tl.sum(lengths, 0)
                listed = (buffers.listed + row * SIZES.VOCAB, begins, length)
                scoring = (source, peak, temperature, inverse)
                i, score, key = listed_tokens(listed, 0, scoring, SIZES)
                threshold, last = threshold_of_row(
                    i, score, key, bracket, listed, slot, state.parameters, scoring, SIZES
                )
                tl.store(buffers.threshold_key + row, threshold)
                tl.store(buffers.threshold_id + row, last)
                min_p = min_p_of(slot, state.parameters)
                highest, token = first_of_block(
                    i, score, key, threshold, last, min_p, seed, position, highest, token
                )  # fmt: skip
                for start in range(BLOCK, length, BLOCK):
                    i, score, key = listed_tokens(listed, start, scoring, SIZES)
                    highest, token = first_of_block(
                        i, score, key, threshold, last, min_p, seed, position, highest, token
                    )  # fmt: skip
        elif edited:
            _, token = _first_of_highest(edited_peaks, edited_tokens)
        else:
            _, token = _first_of_highest(raw_peaks, raw_tokens)
    tl.store(buffers.tokens + row, token.to(tl.int64))
    tl.store(buffers.finite + row, is_finite.to(tl.int8))
    if MASKED:
        tl.store(buffers.nothing_left + row, is_nothing_left.to(tl.int8))
