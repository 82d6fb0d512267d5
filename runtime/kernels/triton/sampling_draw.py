"""From logits to tokens: find each row's peak, add the noise, take the highest. Tiles of a row, then the row."""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.philox import block_words, exp32, gumbel, uniform, word_of
from runahead.runtime.kernels.triton.sampling_borders import border_of_row, listed_tokens
from runahead.runtime.kernels.triton.sampling_brackets import WORST_KEY, bracket_of_row, key_of
from runahead.runtime.kernels.triton.sampling_rows import (
    BORDERED,
    DRAWS,
    EDITED,
    NO_TOKEN,
    TILE,
    heat_of,
    kind_of_row,
    least_weight_of,
    row_peak,
    seed_of,
    share_of_rows,
    source_of_row,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
_FARTHEST = tl.constexpr(100.0)  # of distances in powers of 2: no noise makes up for more
_RESERVE = tl.constexpr(1.0 + 2e-4)  # ten times what the rounding of times and scores can amount to


@triton.jit
def _scan_kernel(
    logits,
    logits_stride,
    logit_rows,
    slots,
    alive,
    seq_len,
    parameters,
    partial_max,
    partial_arg,
    kinds,
    SAMPLES: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The highest raw logit of a tile and its id; +inf if one of them is not finite. For the sampler, also what kind of
    row it is."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    is_alive = tl.load(alive + slot) != 0
    if is_alive:
        i = tile * TILE + tl.arange(0, TILE)
        inside = i < VOCAB
        base = logits + tl.load(logit_rows + row).to(tl.int64) * logits_stride
        x = tl.load(base + i, mask=inside, other=float("-inf"))
        finite = tl.abs(x) < float("inf")  # a NaN is not
        bad = tl.max((inside & (finite == 0)).to(tl.int32), 0)
        x = tl.where(finite, x, float("-inf"))
        peak = tl.max(x, 0)
        tl.store(partial_max + row * TILES + tile, tl.where(bad != 0, float("inf"), peak))
        tl.store(partial_arg + row * TILES + tile, tl.min(tl.where(x == peak, i, NO_TOKEN), 0))
    if SAMPLES:
        if tile == 0:
            kind = tl.where(is_alive, kind_of_row(slot, seq_len, parameters, VOCAB), 0)
            tl.store(kinds + row, kind.to(tl.int8))


def scan(
    logits: torch.Tensor,
    logit_rows: torch.Tensor,
    slots: torch.Tensor,
    alive: torch.Tensor,
    partial_max: torch.Tensor,
    partial_arg: torch.Tensor,
    sampled: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Enqueue the search for the peaks of n rows: float32 and int32 [n, tiles], for rows whose slot is alive.

    logits: float32 [rows, vocab]. logit_rows, slots: int [n] each row's place there, and in `alive`, int8.
    sampled: where the rows are to be sampled, `seq_len` and `parameters` of the row state and `kinds`, int8 [n], which
    is written for all rows.
    """
    seq_len, parameters, kinds = (slots, slots, alive) if sampled is None else sampled  # placeholders, not read
    _scan_kernel[(partial_max.shape[1], slots.shape[0])](
        logits,
        logits.stride(0),
        logit_rows,
        slots,
        alive,
        seq_len,
        parameters,
        partial_max,
        partial_arg,
        kinds,
        SAMPLES=sampled is not None,
        VOCAB=logits.shape[1],
        TILES=partial_max.shape[1],
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit
def _first_of_tile(source, i, x, drawn, peak, heat, seed, position, soonest, TILE: tl.constexpr):
    """The highest score with noise of a tile's tokens that are `drawn`, its id, and `soonest` after this tile.

    soonest: when the first to arrive of the tiles so far does, at the latest; in which race, is said here.

    The highest of score + noise is the first to arrive in a race in which a token with the uniform number u takes the
    time -log(u) * e**-score. A logarithm is not needed to see which tokens may be the first: -log(u) is at least 1 - u,
    and more than that by a factor which is known from 1 - u. The noise is computed for those alone that may be the
    first of this tile and of the tiles before it: one or two in most tiles, none in many.
    """
    first_block = tl.min(i, 0) // 4
    words = block_words(seed, position, first_block + tl.arange(0, TILE // 4))
    by_id = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3])).reshape([TILE])
    cold = tl.minimum(1.0 / heat * _LOG2_E, 3e38)
    slowness = tl.exp2(tl.minimum((peak - x) * cold, _FARTHEST))
    earliest = tl.where(drawn, (1.0 - uniform(by_id)) * slowness, float("inf"))
    first = tl.min(earliest, 0)
    least = first / tl.min(tl.where(drawn, slowness, float("inf")), 0)  # 1 - u of that token is no more
    factor = tl.where(least < 0.68, 1.0 + least, tl.where(least < 0.999, 7.0, 17.0))
    soonest = tl.minimum(soonest, first * factor)
    may_be_first = earliest <= soonest * _RESERVE
    highest = tl.full([], float("-inf"), tl.float32)
    chosen = tl.full([], NO_TOKEN, tl.int32)
    for _ in range(0, tl.sum(may_be_first.to(tl.int32), 0)):
        token = tl.min(tl.where(may_be_first, i, NO_TOKEN), 0)
        may_be_first = may_be_first & (i != token)
        noisy = tl.div_rn(tl.load(source + token) - peak, heat) + gumbel(word_of(seed, position, token))
        better = noisy > highest  # ids rise: the first of equals stays
        highest = tl.where(better, noisy, highest)
        chosen = tl.where(better, token, chosen)
    return highest, chosen, soonest


@triton.jit(do_not_specialize=["count"])
def draw_kernel(
    logits,
    logits_stride,
    logit_rows,
    slots,
    kinds,
    count,
    seq_len,
    parameters,
    partial_max,
    edited_max,
    scores,
    sums,
    keys,
    listed,
    best_score,
    best_id,
    FULL: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILE: tl.constexpr,
    ROWS_PAD: tl.constexpr,
):
    """The highest score with noise of a tile, and its id, for rows with a temperature.

    Of a row with a border the tokens are drawn that are left for certain; those that may be are listed by ascending
    id, those of a tile behind those of the tiles before it. `listed`: int32 [rows, vocab].
    """
    row, first, end = share_of_rows(kinds, DRAWS, count, TILES, ROWS_PAD)
    if first < end:
        slot = tl.load(slots + row).to(tl.int64)
        kind = tl.load(kinds + row).to(tl.int32)
        edited = FULL & ((kind & EDITED) != 0)
        source, peak, usable = source_of_row(
            logits, logits_stride, logit_rows, row, edited, partial_max, edited_max, scores, VOCAB, TILES, TILES_PAD
        )
        if usable:
            heat = heat_of(slot, parameters)
            seed, position = seed_of(slot, parameters), tl.load(seq_len + slot)
            share = 0.0
            if FULL:
                share = least_weight_of(slot, parameters)
            bordered = FULL & ((kind & BORDERED) != 0)
            low = tl.full([], WORST_KEY, tl.int32)
            high = tl.full([], WORST_KEY, tl.int32)
            place = tl.full([], 0, tl.int32)  # in the row's list
            if bordered:
                low, high, _, _, _, of_tiles = bracket_of_row(
                    sums, keys, row, slot, parameters, VOCAB, TILES, TILES_PAD
                )
                place = tl.sum(tl.where(tl.arange(0, TILES_PAD) < first, of_tiles, 0), 0)
            soonest = tl.full([], float("inf"), tl.float32)
            for tile in range(first, end):
                i = tile * TILE + tl.arange(0, TILE)
                x = tl.load(source + i, mask=i < VOCAB, other=float("-inf"))
                drawn = i < VOCAB
                if bordered:
                    key = key_of(tl.div_rn(x - peak, heat + tl.zeros_like(x)))
                    between = (drawn & (key > low) & (key <= high)).to(tl.int32)
                    at = listed + row * VOCAB + place + tl.cumsum(between, 0) - 1
                    tl.store(at, i, mask=between != 0)
                    place += tl.sum(between, 0)
                    drawn = drawn & (key <= low)
                if share > 0.0:
                    drawn = drawn & (exp32(tl.div_rn(x - peak, heat + tl.zeros_like(x))) >= share)
                highest = tl.full([], float("-inf"), tl.float32)
                chosen = tl.full([], NO_TOKEN, tl.int32)
                if tl.max(drawn.to(tl.int32), 0) != 0:
                    highest, chosen, soonest = _first_of_tile(
                        source, i, x, drawn, peak, heat, seed, position, soonest, TILE
                    )
                tl.store(best_score + row * TILES + tile, highest)
                tl.store(best_id + row * TILES + tile, chosen)


@triton.jit
def _first_of_highest(values, ids, row, TILES: tl.constexpr, TILES_PAD: tl.constexpr):
    """The highest of a row's tiles and its id, the lowest id among equals."""
    t = tl.arange(0, TILES_PAD)
    value = tl.load(values + row * TILES + t, mask=t < TILES, other=float("-inf"))
    token = tl.load(ids + row * TILES + t, mask=t < TILES, other=NO_TOKEN)
    highest = tl.max(value, 0)
    return highest, tl.min(tl.where(value == highest, token, NO_TOKEN), 0)


@triton.jit
def _first_of_list(
    listed,
    length,
    source,
    peak,
    heat,
    border,
    last,
    share,
    seed,
    position,
    BLOCK: tl.constexpr,
):
    """The highest score with noise of what is left of a row's list, and its id, the lowest id among equals."""
    highest = tl.full([], float("-inf"), tl.float32)
    chosen = tl.full([], NO_TOKEN, tl.int32)
    for start in range(0, length, BLOCK):
        i, score, key = listed_tokens(listed, start, length, source, peak, heat, border, last, BLOCK)
        drawn = (key <= border) & (exp32(score) >= share)
        noisy = tl.where(drawn, score + gumbel(word_of(seed, position, i)), float("-inf"))
        best = tl.max(noisy, 0)
        better = best > highest  # ids ascend: the first of equals stays
        chosen = tl.where(better, tl.min(tl.where(noisy == best, i, NO_TOKEN), 0), chosen)
        highest = tl.where(better, best, highest)
    return highest, chosen


@triton.jit
def finish_kernel(
    logits,
    logits_stride,
    logit_rows,
    slots,
    alive,
    kinds,
    seq_len,
    parameters,
    partial_max,
    partial_arg,
    edited_max,
    edited_arg,
    lowest_allowed,
    scores,
    sums,
    keys,
    listed,
    best_score,
    best_id,
    cut_key,
    cut_id,
    tokens,
    finite,
    FULL: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each row's token, from its tiles, and from its list if it has a border. A row fails where a logit, raw or
    changed, is not finite."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.full([], 0, tl.int32)
    is_finite = tl.full([], 1, tl.int32)
    if tl.load(alive + slot) != 0:
        peak = row_peak(partial_max, row, TILES, TILES_PAD)
        kind = tl.load(kinds + row).to(tl.int32)
        edited = FULL & ((kind & EDITED) != 0)
        if edited & (peak < float("inf")):
            peak = row_peak(edited_max, row, TILES, TILES_PAD)
        if peak == float("inf"):
            is_finite = tl.full([], 0, tl.int32)
            tl.store(partial_max + row * TILES, peak)  # it has no log-probabilities either
        elif peak == float("-inf"):
            t = tl.arange(0, TILES_PAD)
            lowest = tl.min(tl.load(lowest_allowed + row * TILES + t, mask=t < TILES, other=NO_TOKEN), 0)
            token = tl.where(lowest == NO_TOKEN, 0, lowest)
        elif (kind & DRAWS) != 0:
            highest, token = _first_of_highest(best_score, best_id, row, TILES, TILES_PAD)
            if FULL & ((kind & BORDERED) != 0):
                source = logits + tl.load(logit_rows + row).to(tl.int64) * logits_stride
                if edited:
                    source = scores + row * VOCAB
                own = listed + row * VOCAB
                border, last, length = border_of_row(
                    sums, keys, own, row, slot, parameters, source, peak, VOCAB, TILES, TILES_PAD, BLOCK
                )
                tl.store(cut_key + row, border)
                tl.store(cut_id + row, last)
                among, other = _first_of_list(
                    own, length, source, peak, heat_of(slot, parameters), border, last,
                    least_weight_of(slot, parameters), seed_of(slot, parameters), tl.load(seq_len + slot),
                    BLOCK // 4,
                )  # fmt: skip
                better = (among > highest) | ((among == highest) & (other < token))
                token = tl.where(better, other, token)
        elif edited:
            _, token = _first_of_highest(edited_max, edited_arg, row, TILES, TILES_PAD)
        else:
            _, token = _first_of_highest(partial_max, partial_arg, row, TILES, TILES_PAD)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(finite + row, is_finite.to(tl.int8))
