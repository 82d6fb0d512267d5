"""Penalties, bias and masks on the device, for rows whose logits change before sampling.

The counterpart of the first half of `reference.sampling_filters`. `threshold.py` has top-k and top-p, `draw.py` min-p.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.row_state.record import int_of, offset_of
from runahead.runtime.kernels.triton.sampling.parameters import (
    EDITED,
    NO_TOKEN,
    ahead_of,
    has_grammar,
    logits_of_row,
    tiles_of_program,
)
from runahead.runtime.kernels.triton.sampling.penalties import penalize

_MIN_POSITION = offset_of("min_position")
_STOP_COUNT = offset_of("stop_count")
_BIAS_COUNT = offset_of("bias_count")
_ALLOWED_WORDS = offset_of("allowed_words")


@triton.jit(do_not_specialize=["count"])
def edit_kernel(
    rows, count, state, penalties, mask_words, masks, buffers, runs, VERIFIES: tl.constexpr, MOST_DRAFTS: tl.constexpr,
    MASK_AT: tl.constexpr, MASK_LINE: tl.constexpr, MASK_LINES: tl.constexpr, MAX_STOP_IDS: tl.constexpr,
    MAX_BIAS: tl.constexpr, BIAS_BLOCK: tl.constexpr, SAMPLED_VOCAB: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """Copy an edited row's logits to `edited_logits` with penalties, masks (-inf) and bias, and find each tile's
    highest and its id.

    +inf if a penalty overflows any logit, or a bias an unmasked one: the row has failed.
    masks: some rows have a grammar; the launch's copies have MASK_LINES lines of each row. mask_words: of a row's
    allowed tokens. SAMPLED_VOCAB: logits of ids from here on are -inf and stay so.
    """
    VOCAB: tl.constexpr = SIZES.VOCAB
    TILES: tl.constexpr = SIZES.TILES
    TILE: tl.constexpr = SIZES.TILE
    row, first, end = tiles_of_program(buffers.kinds, EDITED, count, TILES, SIZES.ROWS_PAD)
    if first < end:
        slot = tl.load(rows.slots + row).to(tl.int64)
        base = logits_of_row(rows, row)
        has_allowed = int_of(state.parameters, slot, _ALLOWED_WORDS) > 0
        ruled = False
        if masks is not None:
            ruled = has_grammar(slot, state.parameters)
        ahead = ahead_of(row, runs.width, VERIFIES)
        below = tl.load(state.seq_len + slot) + ahead < int_of(state.parameters, slot, _MIN_POSITION)
        masked_stops = tl.where(below, int_of(state.parameters, slot, _STOP_COUNT), 0)
        biased = int_of(state.parameters, slot, _BIAS_COUNT)
        out = buffers.edited_logits + row * VOCAB
        for tile in range(first, end):
            i = tile * TILE + tl.arange(0, TILE)
            inside = i < VOCAB
            x = tl.load(base + i, mask=inside, other=float("-inf"))
            x = penalize(
                x, i, inside, slot, state.parameters, penalties, mask_words, runs.drafts + slot * MOST_DRAFTS, ahead,
                VOCAB, VERIFIES,
            )  # fmt: skip
            lost = (tl.abs(x) < float("inf")) == 0
            if SAMPLED_VOCAB < VOCAB:
                lost = lost & (i < SAMPLED_VOCAB)
            word = tl.load(state.allowed + slot * mask_words + i // 32, mask=inside & has_allowed, other=0)
            permitted = ((word >> (i % 32)) & 1) != 0
            if masks is not None:
                mask = masks.words + (slot * MASK_LINES + ahead) * MASK_LINE + MASK_AT
                word = tl.load(mask + i // 32, mask=inside & ruled, other=0)
                may_come = ((word >> (i % 32)) & 1) != 0
                permitted = tl.where(ruled, may_come & (permitted | (has_allowed == 0)), permitted)
                x = tl.where(permitted | (ruled == 0), x, float("-inf"))
            x = tl.where(permitted | (has_allowed == 0), x, float("-inf"))
            if SAMPLED_VOCAB < VOCAB:
                permitted = permitted & (i < SAMPLED_VOCAB)
            tl.store(buffers.lowest_allowed + row * TILES + tile, tl.min(tl.where(permitted, i, NO_TOKEN), 0))
            for index in range(0, masked_stops):
                x = tl.where(i == tl.load(state.stop_ids + slot * MAX_STOP_IDS + index), float("-inf"), x)
            tl.store(out + i, tl.where(lost, float("inf"), x), mask=inside)
            tl.debug_barrier()  # other threads of this program access the stored values here
            for start in range(0, biased, BIAS_BLOCK):  # masked logits stay, overflows become +inf
                b = start + tl.arange(0, BIAS_BLOCK)
                token = tl.load(state.bias_ids + slot * MAX_BIAS + b, mask=b < biased, other=-1)
                here = (token >= tile * TILE) & (token < tl.minimum(tile * TILE + TILE, VOCAB))
                value = tl.load(state.bias_values + slot * MAX_BIAS + b, mask=b < biased, other=0.0)
                before = tl.load(out + token, mask=here, other=0.0, volatile=True)
                after = before + value
                good = (tl.abs(after) < float("inf")) | (before == float("-inf"))
                tl.store(out + token, tl.where(good, after, float("inf")), mask=here)
            tl.debug_barrier()
            x = tl.load(out + i, mask=inside, other=float("-inf"), volatile=True)
            peak = tl.max(x, 0)
            tl.store(buffers.edited_max + row * TILES + tile, peak)
            tl.store(buffers.edited_arg + row * TILES + tile, tl.min(tl.where(x == peak, i, NO_TOKEN), 0))
