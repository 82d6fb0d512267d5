"""Finds the best token of each tile: the row's peak, the noise, the highest score."""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.sampling.gumbel import (
    LOG2_E,
    NEVER,
    by_four,
    first_of_tile,
    may_arrive,
    soonest_of_row,
)
from runahead.runtime.kernels.triton.sampling.parameters import (
    DRAWS,
    EDITED,
    HAS_THRESHOLD,
    NO_TOKEN,
    TILE,
    LogitRows,
    kind_of_row,
    logits_of_row,
    min_p_of,
    position_of,
    seed_of,
    source_of_row,
    temperature_of,
    tiles_of_program,
)
from runahead.runtime.kernels.triton.sampling.philox import block_words, exp32
from runahead.runtime.kernels.triton.sampling.scores import WORST_KEY, inverse_of, key_of, scores_of
from runahead.runtime.kernels.triton.sampling.threshold_bracket import bracket_of_row


@triton.jit
def _scan_kernel(
    rows, alive, partial_max, partial_arg, sampled, width, VERIFIES: tl.constexpr, MASKED: tl.constexpr,
    FIRST: tl.constexpr, VOCAB: tl.constexpr, SAMPLED_VOCAB: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find a tile's highest raw logit and its id; +inf if one is not finite. sampled: also find the row's
    `kinds`.

    Sets logits of ids from SAMPLED_VOCAB on to -inf, so that later kernels need not check. FIRST: the first logit's id.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(rows.slots + row).to(tl.int64)
    is_alive = tl.load(alive + slot) != 0
    if is_alive:
        i = tile * TILE + tl.arange(0, TILE)
        inside = i < VOCAB
        base = logits_of_row(rows, row)
        x = tl.load(base + i, mask=inside, other=float("-inf"))
        if SAMPLED_VOCAB < VOCAB:
            tl.store(base + i, float("-inf"), mask=inside & (i >= SAMPLED_VOCAB))
            inside = i < SAMPLED_VOCAB
            x = tl.where(inside, x, float("-inf"))
        finite = tl.abs(x) < float("inf")  # false for NaN
        bad = tl.max((inside & (finite == 0)).to(tl.int32), 0)
        x = tl.where(finite, x, float("-inf"))
        peak = tl.max(x, 0)
        tl.store(partial_max + row * TILES + tile, tl.where(bad != 0, float("inf"), peak))
        tl.store(partial_arg + row * TILES + tile, tl.min(tl.where(x == peak, FIRST + i, NO_TOKEN), 0))
    if sampled is not None:
        seq_len, parameters, kinds = sampled
        if tile == 0:
            position = position_of(seq_len, slot, row, width, VERIFIES)
            kind = tl.where(is_alive, kind_of_row(slot, position, parameters, VOCAB, MASKED), 0)
            tl.store(kinds + row, kind.to(tl.int8))


def scan(
    rows: LogitRows,
    alive: torch.Tensor,
    partial_max: torch.Tensor,
    partial_arg: torch.Tensor,
    sampled: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    width: int = 1,
    masked: bool = False,
    sampled_vocab: int | None = None,
    first: int = 0,
) -> None:
    """Enqueue the search for the peaks of n rows: float32 and int32 [n, tiles], for rows whose slot is alive.

    alive: int8, by slot.
    sampled: for rows to be sampled, `seq_len` and `parameters` of the row state and the output `kinds`, int8 [n],
        written for all rows. width: consecutive rows that are the run of one row of the row state. masked: some rows
        have a grammar. sampled_vocab: logits from this index on become -inf; None: there are none. first: the id of
        the first logit.
    """
    vocab = rows.logits.shape[1]
    _scan_kernel[(partial_max.shape[1], rows.slots.shape[0])](
        rows,
        alive,
        partial_max,
        partial_arg,
        sampled,
        width,
        VERIFIES=width > 1,
        MASKED=masked,
        FIRST=first,
        VOCAB=vocab,
        SAMPLED_VOCAB=vocab if sampled_vocab is None else sampled_vocab,
        TILES=partial_max.shape[1],
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["count"])
def draw_kernel(
    rows, count, state, buffers, width, FULL: tl.constexpr, VERIFIES: tl.constexpr, FIRST: tl.constexpr,
    SIZES: tl.constexpr,
):  # fmt: skip
    """Find a tile's highest score plus noise and its id, for rows with a temperature. FIRST: id of the first logit, a
    multiple of 4; 0 if FULL.

    With a threshold, tokens that are certainly kept are drawn here; uncertain ones are listed by ascending id, a tile's
    from its first index.
    """
    VOCAB: tl.constexpr = SIZES.VOCAB
    TILES: tl.constexpr = SIZES.TILES
    TILE: tl.constexpr = SIZES.TILE
    row, first, end = tiles_of_program(buffers.kinds, DRAWS, count, TILES, SIZES.ROWS_PAD)
    if first < end:
        slot = tl.load(rows.slots + row).to(tl.int64)
        kind = tl.load(buffers.kinds + row).to(tl.int32)
        edited = FULL & ((kind & EDITED) != 0)
        source, peaks, peak, usable = source_of_row(rows, row, edited, buffers, SIZES)
        source -= FIRST
        if usable:
            temperature = temperature_of(slot, state.parameters)
            inverse = inverse_of(temperature, peak)
            seed, position = seed_of(slot, state.parameters), position_of(state.seq_len, slot, row, width, VERIFIES)
            min_p = 0.0
            if FULL:
                min_p = min_p_of(slot, state.parameters)
            has_threshold = FULL & ((kind & HAS_THRESHOLD) != 0)
            low = tl.full([], WORST_KEY, tl.int32)
            high = tl.full([], WORST_KEY, tl.int32)
            soonest = tl.full([], NEVER, tl.float32)
            if has_threshold:
                low, high, amount_low, _, _ = bracket_of_row(buffers, row, slot, state.parameters, SIZES)
                soonest = soonest_of_row(amount_low, slot, state.parameters, VOCAB)
            log2_scale = tl.minimum(1.0 / temperature * LOG2_E, 3e38)
            worst = -tl.log(soonest)  # later arrivals do not count
            for tile in range(first, end):
                highest = tl.full([], float("-inf"), tl.float32)
                chosen = tl.full([], NO_TOKEN, tl.int32)
                nearest = key_of(scores_of(tl.load(peaks + tile), peak, temperature, inverse))
                listed_here = tl.full([], 0, tl.int32)
                if nearest <= high:
                    i = FIRST + tile * TILE + tl.arange(0, TILE)
                    drawn = i < FIRST + VOCAB
                    x = tl.load(source + i, mask=drawn, other=float("-inf"))
                    four = tl.zeros([TILE // 4], tl.int32)
                    score = x
                    if has_threshold | (min_p > 0.0):
                        score = scores_of(x, peak, temperature, inverse)
                    if has_threshold:
                        key = key_of(score)
                        between = drawn & (key > low) & (key <= high)
                        # The ids of tokens that are `between`, in order.
                        b0, b1, b2, b3 = by_four(between.to(tl.int32), TILE)
                        i0, _, _, _ = by_four(i, TILE)
                        four = b0 + b1 + b2 + b3
                        at = buffers.listed + row * VOCAB + tile * TILE + (tl.cumsum(four, 0) - four)
                        tl.store(at, i0, mask=b0 != 0)
                        tl.store(at + b0, i0 + 1, mask=b1 != 0)
                        tl.store(at + (b0 + b1), i0 + 2, mask=b2 != 0)
                        tl.store(at + (b0 + b1 + b2), i0 + 3, mask=b3 != 0)
                        drawn = drawn & (key <= low)
                    if min_p > 0.0:
                        drawn = drawn & (exp32(score) >= min_p)
                    words = block_words(seed, position, FIRST // 4 + tile * (TILE // 4) + tl.arange(0, TILE // 4))
                    may = may_arrive((x - peak) * log2_scale, drawn, words, soonest, TILE)
                    some = (may[0] | may[1] | may[2] | may[3]).to(tl.int32)
                    found = tl.sum(four + some * (2 * TILE), 0)
                    listed_here = found % (2 * TILE)
                    if found >= 2 * TILE:
                        highest, chosen, soonest = first_of_tile(
                            source, i, x, may, words, peak, temperature, log2_scale, seed, position, soonest, TILE
                        )
                if has_threshold:
                    tl.store(buffers.list_lengths + row * TILES + tile, listed_here)
                in_time = highest >= worst
                tl.store(buffers.best_score + row * TILES + tile, tl.where(in_time, highest, float("-inf")))
                tl.store(buffers.best_id + row * TILES + tile, tl.where(in_time, chosen, NO_TOKEN))
