"""Classifies a launch's rows by what they need of the sampler, and distributes a kernel's programs among such rows.

A kernel has as many programs as a GPU runs at once, for any number of rows. They are divided evenly among the rows that
need the kernel: a single such row of many is as fast as alone, and without any the programs end after one load. The
number of a row's tiles in a program changes no bit: it computes tile by tile.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.row_state.record import float_of, int_of, long_of, offset_of

TILE: Final = 2048  # tokens of a tile
_PROGRAMS: Final = 528  # of a kernel: an H200 has 132 multiprocessors, each of which runs 4 at once
_TEMPERATURE = offset_of("temperature")
_TOP_K = offset_of("top_k")
_TOP_P = offset_of("top_p")
_MIN_POSITION = offset_of("min_position")
_BIAS_COUNT = offset_of("bias_count")
_ALLOWED_WORDS = offset_of("allowed_words")
_PENALTY_SLOT = offset_of("penalty_slot")
_MIN_P = offset_of("min_p")
_SEED = offset_of("seed")
_LOGPROBS = offset_of("logprobs")
_MASK_EPOCH = offset_of("mask_epoch")
NO_TOKEN = tl.constexpr(0x7FFFFFFF)  # above all ids: it loses every tie

# The bits of `kinds`. A row that is not alive has none.
ASKS = tl.constexpr(1)  # for log-probabilities
EDITED = tl.constexpr(2)  # penalties, bias or a mask change its logits, in `edited_logits`
DRAWS = tl.constexpr(4)  # it has a temperature
HAS_THRESHOLD = tl.constexpr(8)  # it draws above a threshold, by top-k or top-p


class LogitRows(NamedTuple):
    """Rows of logits, and the rows of the row state to which they belong."""

    logits: torch.Tensor  # float32 [rows, vocab]
    stride: int  # from a row of them to the next
    indexes: torch.Tensor  # int32 or int64 [n] each row's index in `logits`
    slots: torch.Tensor  # int32 or int64 [n] each row's slot


class Sizes(NamedTuple):
    """Constants of the sampler's kernels."""

    VOCAB: int
    TILES: int  # of a row; on a rank, its peers' best tokens count as tiles
    TILES_PAD: int
    TILE: int  # tokens of a tile
    ROWS_PAD: int
    SAMPLES: int  # of a row, from which its threshold is estimated
    SAMPLES_PAD: int
    BLOCK: int  # tokens of a row's list that the threshold search keeps in registers


def programs_for(rows: int, tiles: int) -> int:
    """Return the number of programs of a kernel for some of `rows` rows of `tiles` tiles each."""
    return min(rows * tiles, max(rows, _PROGRAMS))


@triton.jit
def ahead_of(row, width, VERIFIES: tl.constexpr):
    """Return the number of earlier tokens in this row's run, if each row of the row state has `width` rows here."""
    ahead = tl.full([], 0, tl.int32)
    if VERIFIES:
        ahead = (row % width).to(tl.int32)
    return ahead


@triton.jit
def position_of(seq_len, slot, row, width, VERIFIES: tl.constexpr):
    """Return the position of a row's next token if all drafts before it are right."""
    return tl.load(seq_len + slot) + ahead_of(row, width, VERIFIES)


@triton.jit
def has_grammar(slot, parameters):
    """Return whether a row, or each of a tensor of rows, has a grammar, and so masks."""
    return long_of(parameters, slot, _MASK_EPOCH) != 0


@triton.jit
def kind_of_row(slot, position, parameters, VOCAB: tl.constexpr, MASKED: tl.constexpr):
    """Return the bits of `kinds` of a live row with this next position."""
    below = position < int_of(parameters, slot, _MIN_POSITION)
    listed = (int_of(parameters, slot, _BIAS_COUNT) > 0) | (int_of(parameters, slot, _ALLOWED_WORDS) > 0)
    edited = below | listed | (int_of(parameters, slot, _PENALTY_SLOT) >= 0)
    if MASKED:
        edited = edited | has_grammar(slot, parameters)
    draws = temperature_of(slot, parameters) > 0.0
    has_threshold = draws & (has_top_k(slot, parameters, VOCAB) | (top_p_of(slot, parameters) < 1.0))
    kind = tl.where(int_of(parameters, slot, _LOGPROBS) >= 0, ASKS, 0) | tl.where(edited, EDITED, 0)
    return kind | tl.where(draws, DRAWS, 0) | tl.where(has_threshold, HAS_THRESHOLD, 0)


@triton.jit
def temperature_of(slot, parameters):
    """Return the temperature."""
    return float_of(parameters, slot, _TEMPERATURE)


@triton.jit
def top_k_of(slot, parameters):
    """Return top_k, if `has_top_k`."""
    return int_of(parameters, slot, _TOP_K)


@triton.jit
def has_top_k(slot, parameters, VOCAB: tl.constexpr):
    """Return whether top-k drops any token."""
    top_k = top_k_of(slot, parameters)
    return (top_k > 0) & (top_k < VOCAB)


@triton.jit
def top_p_of(slot, parameters):
    """Return top_p. 1: off."""
    return float_of(parameters, slot, _TOP_P)


@triton.jit
def min_p_of(slot, parameters):
    """Return min_p. 0: off."""
    return float_of(parameters, slot, _MIN_P)


@triton.jit
def seed_of(slot, parameters):
    """Return the seed, 64 bits."""
    return long_of(parameters, slot, _SEED)


@triton.jit
def tiles_of_program(kinds, KIND: tl.constexpr, count, TILES: tl.constexpr, ROWS_PAD: tl.constexpr):
    """Return this program's row and the range of its tiles, empty if there is none.

    kinds: int8 [count], ROWS_PAD or fewer. Rows with the bit KIND share the programs. Kernels are not specialized on
    `count`, which would compile them again for some numbers.
    """
    r = tl.arange(0, ROWS_PAD)
    has_kind = ((tl.load(kinds + r, mask=r < count, other=0).to(tl.int32) & KIND) != 0).to(tl.int32)
    rows = tl.sum(has_kind, 0)
    programs = tl.minimum(tl.num_programs(0) // tl.maximum(rows, 1), TILES)  # of a row
    index = tl.program_id(0) // programs
    part = tl.program_id(0) % programs
    first = part * TILES // programs
    row = tl.sum((tl.cumsum(has_kind, 0) <= index).to(tl.int32), 0)
    end = tl.where(index < rows, (part + 1) * TILES // programs, first)
    return row.to(tl.int64), first, end


@triton.jit
def logits_of_row(rows, row):
    """Return the pointer to a row's raw logits."""
    return rows.logits + tl.load(rows.indexes + row).to(tl.int64) * rows.stride


@triton.jit
def of_tiles(values, row, other, TILES: tl.constexpr, TILES_PAD: tl.constexpr):
    """Load a value for each of a row's tiles: [TILES_PAD], with `other` past the last one. The highest of a row's peaks
    is +inf if `scan` found a NaN or an infinity.
    """
    t = tl.arange(0, TILES_PAD)
    return tl.load(values + row * TILES + t, mask=t < TILES, other=other)


@triton.jit
def source_of_row(rows, row, edited, buffers, SIZES: tl.constexpr):
    """Return the pointers to a row's logits, edited or raw, and to their tiles' maxima, their maximum, and whether a
    token can be drawn.
    """
    raw_peak = tl.max(of_tiles(buffers.partial_max, row, float("-inf"), SIZES.TILES, SIZES.TILES_PAD), 0)
    source, peaks, peak = logits_of_row(rows, row), buffers.partial_max + row * SIZES.TILES, raw_peak
    if edited:
        source = buffers.edited_logits + row * SIZES.VOCAB
        peaks = buffers.edited_max + row * SIZES.TILES
        peak = tl.max(of_tiles(buffers.edited_max, row, float("-inf"), SIZES.TILES, SIZES.TILES_PAD), 0)
    return source, peaks, peak, (raw_peak < float("inf")) & (tl.abs(peak) < float("inf"))
