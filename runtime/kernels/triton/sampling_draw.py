"""From logits to tokens: find each row's peak, add the noise, take the highest. Tiles of a row, then the row."""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.philox import block_words, gumbel
from runahead.runtime.kernels.triton.row_parameters import float_of, int_of, long_of, place_of

TILE: Final = 2048  # tokens of one program
_TEMPERATURE = place_of("temperature")
_TOP_K = place_of("top_k")
_TOP_P = place_of("top_p")
_MIN_P = place_of("min_p")
_SEED = place_of("seed")
_MIN_POSITION = place_of("min_position")
_BIAS_COUNT = place_of("bias_count")
_ALLOWED_WORDS = place_of("allowed_words")
_PENALTY_SLOT = place_of("penalty_slot")
NO_TOKEN = tl.constexpr(0x7FFFFFFF)  # an id above all others: it loses every tie


@triton.jit
def row_peak(partial_max, row, TILES: tl.constexpr, TILES_PAD: tl.constexpr):
    """The highest of a row's tiles; +inf where `scan` found a NaN or an infinity in one of them."""
    t = tl.arange(0, TILES_PAD)
    return tl.max(tl.load(partial_max + row * TILES + t, mask=t < TILES, other=float("-inf")), 0)


@triton.jit
def is_edited(slot, seq_len, parameters):
    """Whether penalties, bias or a mask change the row's logits; the changed ones are then in `scores`."""
    below = tl.load(seq_len + slot) < int_of(parameters, slot, _MIN_POSITION)
    listed = (int_of(parameters, slot, _BIAS_COUNT) > 0) | (int_of(parameters, slot, _ALLOWED_WORDS) > 0)
    return below | listed | (int_of(parameters, slot, _PENALTY_SLOT) >= 0)


@triton.jit
def is_filtered(slot, parameters, VOCAB: tl.constexpr):
    """Whether top-k, top-p or min-p is on; the row's scores and weights are then ready."""
    k = int_of(parameters, slot, _TOP_K)
    shares = (float_of(parameters, slot, _TOP_P) < 1.0) | (float_of(parameters, slot, _MIN_P) > 0.0)
    return ((k > 0) & (k < VOCAB)) | shares


@triton.jit
def _scan_kernel(
    logits,
    logits_stride,
    logit_rows,
    slots,
    alive,
    partial_max,
    partial_arg,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The highest raw logit of a tile and its id; +inf if one of them is not finite."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if tl.load(alive + slot) != 0:
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


def scan(
    logits: torch.Tensor,
    logit_rows: torch.Tensor,
    slots: torch.Tensor,
    alive: torch.Tensor,
    partial_max: torch.Tensor,
    partial_arg: torch.Tensor,
) -> None:
    """Enqueue the search for the peaks of n rows: float32 and int32 [n, tiles], for rows whose slot is alive.

    logits: float32 [rows, vocab]. logit_rows, slots: int [n] each row's place there, and in `alive`, int8.
    """
    _scan_kernel[(partial_max.shape[1], slots.shape[0])](
        logits,
        logits.stride(0),
        logit_rows,
        slots,
        alive,
        partial_max,
        partial_arg,
        VOCAB=logits.shape[1],
        TILES=partial_max.shape[1],
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit
def draw_kernel(
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
    cut_key,
    cut_id,
    best_score,
    best_id,
    FULL: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """The highest score with noise of a tile, and its id, for rows with a temperature."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    heat = float_of(parameters, slot, _TEMPERATURE)
    if (tl.load(alive + slot) != 0) & (heat > 0.0):
        peak = row_peak(partial_max, row, TILES, TILES_PAD)
        usable = peak < float("inf")
        edited = False
        filtered = False
        share = 0.0
        key, last = 0, 0
        if FULL:
            edited = is_edited(slot, seq_len, parameters)
            filtered = is_filtered(slot, parameters, VOCAB)
            if edited:
                peak = row_peak(edited_max, row, TILES, TILES_PAD)
            usable = usable & (tl.abs(peak) < float("inf"))
            key = tl.load(cut_key + row, mask=filtered & usable, other=0)
            last = tl.load(cut_id + row, mask=filtered & usable, other=0)
            share = float_of(parameters, slot, _MIN_P)
        if usable:
            base = logits + tl.load(logit_rows + row).to(tl.int64) * logits_stride
            block = tile * (TILE // 4) + tl.arange(0, TILE // 4)
            words = block_words(long_of(parameters, slot, _SEED), tl.load(seq_len + slot), block)
            high = tl.full([TILE // 4], float("-inf"), tl.float32)
            chosen = tl.full([TILE // 4], NO_TOKEN, tl.int32)
            for word in tl.static_range(4):
                i = block * 4 + word
                inside = i < VOCAB
                if FULL:
                    raw = tl.load(base + i, mask=inside & ((edited | filtered) == 0), other=float("-inf"))
                    changed = tl.load(scores + row * VOCAB + i, mask=inside & (edited | filtered), other=float("-inf"))
                    x = tl.where(edited | filtered, changed, raw)
                    weight = tl.load(weights + row * VOCAB + i, mask=inside & filtered, other=0.0)
                    at = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # of a score: what is lower has a higher key
                    kept = ((at < key) | ((at == key) & (i <= last))) & (weight >= share)
                    score = tl.where(filtered, x, tl.div_rn(x - peak, heat + tl.zeros_like(x)))
                    inside = inside & (kept | (filtered == 0))
                else:
                    x = tl.load(base + i, mask=inside, other=float("-inf"))
                    score = tl.div_rn(x - peak, heat + tl.zeros_like(x))
                noisy = tl.where(inside, score + gumbel(words[word]), float("-inf"))
                better = noisy > high  # ids rise within a lane: the first of equals stays
                high = tl.where(better, noisy, high)
                chosen = tl.where(better, i, chosen)
            highest = tl.max(high, 0)
            tl.store(best_score + row * TILES + tile, highest)
            tl.store(best_id + row * TILES + tile, tl.min(tl.where(high == highest, chosen, NO_TOKEN), 0))


@triton.jit
def _first_of_highest(values, ids, row, TILES: tl.constexpr, TILES_PAD: tl.constexpr):
    """The id of the highest of a row's tiles, the lowest id among equals."""
    t = tl.arange(0, TILES_PAD)
    value = tl.load(values + row * TILES + t, mask=t < TILES, other=float("-inf"))
    token = tl.load(ids + row * TILES + t, mask=t < TILES, other=NO_TOKEN)
    return tl.min(tl.where(value == tl.max(value, 0), token, NO_TOKEN), 0)


@triton.jit
def finish_kernel(
    slots,
    alive,
    seq_len,
    parameters,
    partial_max,
    partial_arg,
    edited_max,
    edited_arg,
    lowest_allowed,
    best_score,
    best_id,
    tokens,
    finite,
    FULL: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
):
    """Each row's token, from its tiles. A row fails where a logit, raw or changed, is not finite."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.full([], 0, tl.int32)
    is_finite = tl.full([], 1, tl.int32)
    if tl.load(alive + slot) != 0:
        peak = row_peak(partial_max, row, TILES, TILES_PAD)
        edited = False
        if FULL:
            edited = is_edited(slot, seq_len, parameters)
            if edited & (peak < float("inf")):
                peak = row_peak(edited_max, row, TILES, TILES_PAD)
        if peak == float("inf"):
            is_finite = tl.full([], 0, tl.int32)
            tl.store(partial_max + row * TILES, peak)  # it has no log-probabilities either
        elif peak == float("-inf"):
            t = tl.arange(0, TILES_PAD)
            lowest = tl.min(tl.load(lowest_allowed + row * TILES + t, mask=t < TILES, other=NO_TOKEN), 0)
            token = tl.where(lowest == NO_TOKEN, 0, lowest)
        elif float_of(parameters, slot, _TEMPERATURE) > 0.0:
            token = _first_of_highest(best_score, best_id, row, TILES, TILES_PAD)
        elif edited:
            token = _first_of_highest(edited_max, edited_arg, row, TILES, TILES_PAD)
        else:
            token = _first_of_highest(partial_max, partial_arg, row, TILES, TILES_PAD)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(finite + row, is_finite.to(tl.int8))
