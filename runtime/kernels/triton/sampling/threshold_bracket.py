"""Brackets each row's threshold between two keys: the first part of the search in `sampling/threshold.py`."""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.gpu.unrolled import joined, longer
from runahead.runtime.kernels.triton.row_state.record import word
from runahead.runtime.kernels.triton.sampling.parameters import (
    EDITED,
    HAS_THRESHOLD,
    has_top_k,
    source_of_row,
    temperature_of,
    tiles_of_program,
    top_k_of,
    top_p_of,
)
from runahead.runtime.kernels.triton.sampling.scores import (
    WORST_KEY,
    inverse_of,
    key_of,
    limbs_of,
    mass_of,
    mass_of_limbs,
    scores_of,
)

_MASSLESS = tl.constexpr(28.0)  # distance below the highest score at which every mass is 0
_MASSLESS_KEY = tl.constexpr(0x41E00000)

# Distances below the highest score of the estimate. The last one stands for all lower scores.
LADDER: Final = (0.1, 0.25, 0.5, 0.8, 1.2, 1.6, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.5, 7.5, 11.0, 28.0)
# Positions of a bracket's keys relative to the bracket's width, clamped to its ends: in the first round around the
# guess, so that the outer ones are the ends; in the second from the lower end and closer together there, because small
# misses are more frequent. The last key, for all counting tokens, is not set.
OFFSETS: Final = (
    (-1.0, -0.08, -0.027, 0.0, 0.027, 0.08, 1.0, 1.0),
    (0.0, 1 / 36, 4 / 36, 9 / 36, 16 / 36, 25 / 36, 2.0, 2.0),
)
ROUNDS: Final = len(OFFSETS)
TILES_OF_A_SAMPLE: Final = 8  # the estimate samples the first eighth of this many tiles
_LONG = tl.constexpr(4096)  # tokens between two keys that justify a second round
_RUNGS = tl.constexpr(len(LADDER))
_SPOTS = tl.constexpr(len(OFFSETS[0]))
_ROUNDS = tl.constexpr(ROUNDS)
_SAMPLE = tl.constexpr(TILES_OF_A_SAMPLE)
_FINE = tl.constexpr(64)  # positions between two rungs that the guess distinguishes


@triton.jit
def _rough(x, peak, temperature, counts):
    """Return tokens' distances below the highest score, and their contributions to the estimate. They affect only the
    search's speed, so the device's exponential suffices.
    """
    distance = (peak - x) * tl.minimum(1.0 / temperature, 3e38)
    return distance, tl.where(counts, 1.0, tl.exp(-distance))


@triton.jit(do_not_specialize=["count"])
def guess_kernel(rows, count, parameters, buffers, SIZES: tl.constexpr):
    """Estimate the amount of a sample's tokens up to each rung of the ladder: float32 [rows, samples, rungs].

    A sample is the first eighth of eight tiles without each tile's highest token: those are few and weigh most, so the
    guess counts all of them exactly.
    """
    TILE: tl.constexpr = SIZES.TILE
    row, first, end = tiles_of_program(buffers.kinds, HAS_THRESHOLD, count, SIZES.SAMPLES, SIZES.ROWS_PAD)
    if first < end:
        slot = tl.load(rows.slots + row).to(tl.int64)
        edited = (tl.load(buffers.kinds + row).to(tl.int32) & EDITED) != 0
        source, peaks, peak, usable = source_of_row(rows, row, edited, buffers, SIZES)
        if usable:
            counts = has_top_k(slot, parameters, SIZES.VOCAB)
            temperature = temperature_of(slot, parameters)
            e = tl.arange(0, TILE)
            for sample in range(first, end):
                tile = sample * _SAMPLE + e // (TILE // _SAMPLE)
                i = tile * TILE + e % (TILE // _SAMPLE)
                x = tl.load(source + i, mask=i < SIZES.VOCAB, other=float("-inf"))
                sampled = x < tl.load(peaks + tile, mask=i < SIZES.VOCAB, other=float("-inf"))
                distance, weight = _rough(x, peak, temperature, counts)
                weight = tl.where(sampled, weight, 0.0)
                even, odd = (), ()
                for rung in tl.static_range(0, _RUNGS, 2):
                    even = longer(even, tl.where(distance <= tl.load(buffers.ladder + rung), weight, 0.0))
                    up_to = (distance <= tl.load(buffers.ladder + rung + 1)) | (rung + 1 == _RUNGS - 1)
                    odd = longer(odd, tl.where(up_to, weight, 0.0))
                # One pass between threads for all sums.
                within = tl.sum(tl.join(joined(even), joined(odd)), 0).reshape([_RUNGS])
                tl.store(buffers.guesses + (row * SIZES.SAMPLES + sample) * _RUNGS + tl.arange(0, _RUNGS), within)


@triton.jit
def _chord(rise, run):
    """Return the slope of a line; 0 at the ends of the ladder."""
    return tl.where(run > 0.0, rise / tl.where(run > 0.0, run, 1.0), 0.0)


@triton.jit
def _slope(below, above):
    """Return a node's slope from its neighboring chords: their harmonic mean, which keeps the curve monotonic."""
    both = (below > 0.0) & (above > 0.0)
    return tl.where(both, 2.0 * below / tl.where(both, below + above, 1.0) * above, 0.0)


@triton.jit
def _guess(buffers, peaks, row, slot, peak, parameters, SIZES: tl.constexpr):
    """Estimate the threshold's distance below the highest score and its bracket.

    Between two rungs the amount is interpolated by a monotonic cubic. The bracket extends a little beyond the rungs,
    because sampling may put a threshold near a rung on the wrong side.
    """
    s = tl.arange(0, _RUNGS)
    rungs = tl.load(buffers.ladder + s)
    g = tl.arange(0, SIZES.SAMPLES_PAD)[:, None]
    inside = g < SIZES.SAMPLES
    parts = tl.load(buffers.guesses + (row * SIZES.SAMPLES + g) * _RUNGS + s[None, :], mask=inside, other=0.0)
    t = tl.arange(0, SIZES.TILES_PAD)[:, None]
    x = tl.load(peaks + t, mask=t < SIZES.TILES, other=float("-inf"))
    counts = has_top_k(slot, parameters, SIZES.VOCAB)
    distance, weight = _rough(x, peak, temperature_of(slot, parameters), counts)
    up_to = (distance <= rungs[None, :]) | (s[None, :] == _RUNGS - 1)
    of_peaks = tl.where((t < SIZES.TILES) & up_to, weight, 0.0)
    amounts = tl.sum(parts, 0) * _SAMPLE + tl.sum(of_peaks, 0)
    top_p_mass = top_p_of(slot, parameters) * word(amounts, _RUNGS - 1)
    target = tl.where(counts, top_k_of(slot, parameters).to(tl.float32), top_p_mass)
    j = tl.minimum(tl.sum((amounts < target).to(tl.int32), 0), _RUNGS - 1)
    low, high = word(rungs, j - 1), word(rungs, j)
    begin, end = word(amounts, j - 1), word(amounts, j)
    chord = _chord(end - begin, high - low)
    before = _chord(begin - word(amounts, j - 2), low - word(rungs, j - 2))
    after = _chord(word(amounts, j + 1) - end, word(rungs, j + 1) - high)
    rise = (high - low) * _slope(before, chord)
    fall = (high - low) * _slope(chord, after)
    x = (tl.arange(0, _FINE) + 1).to(tl.float32) / _FINE
    x2, x3 = x * x, x * x * x
    curve = begin + (end - begin) * (3.0 * x2 - 2.0 * x3) + rise * (x3 - 2.0 * x2 + x) + fall * (x3 - x2)
    found = tl.sum((curve < target).to(tl.int32), 0)
    guess = low + (high - low) * (found.to(tl.float32) + 0.5) / _FINE
    beyond = (high - low) / 4
    return guess, tl.maximum(low - beyond, 0.0), tl.minimum(high + beyond, _MASSLESS)


@triton.jit(do_not_specialize=["count"])
def bracket_kernel(rows, count, parameters, buffers, AGAIN: tl.constexpr, THREADS: tl.constexpr, SIZES: tl.constexpr):
    """Compute the amount of a row's tokens up to each of a few keys: int64 [rows, rounds, tiles, spots], summed over a
    program's tiles at its first tile, and zeros at the others.

    The first round sets keys by the guess; the second between the two keys around the threshold, for rows with many
    tokens there. keys: int32 [rows, rounds, spots], ascending. A thread of THREADS processes four tokens at a time,
    whose limbs float32 adds exactly.
    """
    TILE: tl.constexpr = SIZES.TILE
    row, first, end = tiles_of_program(buffers.kinds, HAS_THRESHOLD, count, SIZES.TILES, SIZES.ROWS_PAD)
    if first < end:
        slot = tl.load(rows.slots + row).to(tl.int64)
        edited = (tl.load(buffers.kinds + row).to(tl.int32) & EDITED) != 0
        source, peaks, peak, usable = source_of_row(rows, row, edited, buffers, SIZES)
        line = row * _ROUNDS + AGAIN
        s = tl.arange(0, _SPOTS)
        by_count = has_top_k(slot, parameters, SIZES.VOCAB)
        if usable:
            if AGAIN:
                low_key, high_key, amount_low, amount_high, _ = _round_of_row(
                    buffers, row * _ROUNDS, slot, parameters, SIZES
                )
                end = tl.where(_is_long(high_key, amount_high - amount_low, by_count), end, first)
                low = tl.maximum(low_key, 0).to(tl.float32, bitcast=True)
                high = high_key.to(tl.float32, bitcast=True)
                high = tl.where(high > _MASSLESS, tl.minimum(high, 2.0 * low + 1.0), high)
                center = low
            else:
                center, low, high = _guess(buffers, peaks, row, slot, peak, parameters, SIZES)
            if first < end:
                last_key = tl.where(by_count, WORST_KEY, _MASSLESS_KEY)
                at = center + (high - low) * tl.load(buffers.offsets + AGAIN * _SPOTS + s)
                up_to = key_of(tl.minimum(tl.maximum(at, low), high))
                up_to = tl.where(s == _SPOTS - 1, last_key, up_to)
                if first == 0:
                    tl.store(buffers.threshold_keys + line * _SPOTS + s, up_to)
                thresholds = -up_to.to(tl.float32, bitcast=True)
                spots = ()
                for spot in tl.static_range(_SPOTS):
                    spots = longer(spots, word(thresholds, spot))
                temperature = temperature_of(slot, parameters)
                inverse = inverse_of(temperature, peak)
                within = tl.zeros([THREADS, 2, 2, 2], tl.int64)
                for tile in range(first, end):
                    uppers = tl.zeros([4 * THREADS, 2, 2, 2], tl.float32)
                    lowers = tl.zeros([4 * THREADS, 2, 2, 2], tl.float32)
                    for step in range(0, TILE // (4 * THREADS)):
                        i = tile * TILE + step * (4 * THREADS) + tl.arange(0, 4 * THREADS)
                        x = tl.load(source + i, mask=i < SIZES.VOCAB, other=float("-inf"))
                        score = scores_of(x, peak, temperature, inverse)
                        if by_count:
                            upper = tl.zeros_like(x)
                            lower = (i < SIZES.VOCAB).to(tl.float32)
                        else:
                            upper, lower = limbs_of(score)
                        # Multiplying by 1 or 0 takes fewer instructions than selecting each limb.
                        counts, upper_limbs, lower_limbs = (), (), ()
                        for spot in tl.static_range(_SPOTS):
                            counts = longer(counts, tl.where(score >= spots[spot], 1.0, 0.0))
                            upper_limbs, lower_limbs = longer(upper_limbs, upper), longer(lower_limbs, lower)
                        uppers = tl.fma(joined(counts), joined(upper_limbs), uppers)
                        lowers = tl.fma(joined(counts), joined(lower_limbs), lowers)
                    upper_sums = tl.sum(uppers.reshape([THREADS, 4, 2, 2, 2]), 1)
                    within += mass_of_limbs(upper_sums, tl.sum(lowers.reshape([THREADS, 4, 2, 2, 2]), 1))
                t = tl.arange(0, SIZES.TILES_PAD)[:, None]
                at = buffers.threshold_sums + (line * SIZES.TILES + t) * _SPOTS + s[None, :]
                amounts = tl.where(t == first, tl.sum(within, 0).reshape([_SPOTS])[None, :], 0)
                tl.store(at, amounts, mask=(t >= first) & (t < end))


@triton.jit
def top_p_target(top_p, total):
    """Return the target mass like `reference.sampling_filters`: at least 1, so that a token is kept."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _is_long(high, between, by_count):
    """Return whether many tokens may lie between two keys with the amount `between`; the least likely one is at
    `high`."""
    least = mass_of(-high.to(tl.float32, bitcast=True)).to(tl.float32)
    return between.to(tl.float32) > tl.where(by_count, 1.0, least) * _LONG


@triton.jit
def _round_of_row(buffers, line, slot, parameters, SIZES: tl.constexpr):
    """Return one round's results for `bracket_of_row`. `low` is -1 if the threshold may be at the highest score."""
    s = tl.arange(0, _SPOTS)
    t = tl.arange(0, SIZES.TILES_PAD)[:, None]
    inside = t < SIZES.TILES
    at = buffers.threshold_sums + (line * SIZES.TILES + t) * _SPOTS + s[None, :]
    amounts = tl.sum(tl.load(at, mask=inside, other=0), 0)
    by_count = has_top_k(slot, parameters, SIZES.VOCAB)
    target = top_p_target(top_p_of(slot, parameters), tl.max(amounts, 0))
    target = tl.where(by_count, top_k_of(slot, parameters).to(tl.int64), target)
    key = tl.load(buffers.threshold_keys + line * _SPOTS + s)
    enough = amounts >= target
    low = tl.max(tl.where(enough, -1, key), 0)
    high = tl.min(tl.where(enough, key, WORST_KEY), 0)
    amount_low = tl.max(tl.where(enough, 0, amounts), 0)
    amount_high = tl.min(tl.where(enough, amounts, 0x7FFFFFFFFFFFFFFF), 0)
    return low, high, amount_low, amount_high, target


@triton.jit
def bracket_of_row(buffers, row, slot, parameters, SIZES: tl.constexpr):
    """Bracket a row's threshold: returns the keys `low` and `high`, the amounts up to them, and the target.

    Tokens up to `low` are kept, tokens above `high` dropped. With both top-k and top-p `low` is -1: top-p's threshold
    may be anywhere before top-k's.
    """
    low, high, amount_low, amount_high, target = _round_of_row(buffers, row * _ROUNDS, slot, parameters, SIZES)
    by_count = has_top_k(slot, parameters, SIZES.VOCAB)
    if _is_long(high, amount_high - amount_low, by_count):
        low, high, amount_low, amount_high, target = _round_of_row(buffers, row * _ROUNDS + 1, slot, parameters, SIZES)
    if by_count & (top_p_of(slot, parameters) < 1.0):
        low = tl.full([], -1, tl.int32)
        amount_low = tl.full([], 0, tl.int64)
    return low, high, amount_low, amount_high, target
