"""Admission on the device: a record of the bulk slot goes into the row state. Called by `take_plan`'s kernel."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runtime import plan as layout

_SLOT = tl.constexpr(layout.ADMIT_SLOT)
_TEMPERATURE = tl.constexpr(layout.ADMIT_TEMPERATURE)
_TOP_K = tl.constexpr(layout.ADMIT_TOP_K)
_TOP_P = tl.constexpr(layout.ADMIT_TOP_P)
_MIN_P = tl.constexpr(layout.ADMIT_MIN_P)
_SEED_LOW = tl.constexpr(layout.ADMIT_SEED_LOW)
_SEED_HIGH = tl.constexpr(layout.ADMIT_SEED_HIGH)
_LOGPROBS = tl.constexpr(layout.ADMIT_LOGPROBS)
_MIN_POSITION = tl.constexpr(layout.ADMIT_MIN_POSITION)
_MAX_POSITION = tl.constexpr(layout.ADMIT_MAX_POSITION)
_STOP_IDS = tl.constexpr(layout.ADMIT_STOP_IDS)
_BIAS = tl.constexpr(layout.ADMIT_BIAS)
_ALLOWED_WORDS = tl.constexpr(layout.ADMIT_ALLOWED_WORDS)
_BLOCKS = tl.constexpr(layout.ADMIT_BLOCKS)
_ADMIT_WORDS = tl.constexpr(layout.ADMIT_WORDS)


@triton.jit
def word(words, index: tl.constexpr):
    """One word of a header [16] that is in registers."""
    return tl.sum(tl.where(tl.arange(0, 16) == index, words, 0), 0)


@triton.jit
def _copy(source, target, count, fill, width, TILE: tl.constexpr):
    """target[:count] = source[:count] and target[count:width] = fill. Words of 32 bits."""
    for first in range(0, width, TILE):
        i = first + tl.arange(0, TILE)
        value = tl.load(source + i, mask=i < count, other=fill, volatile=True)
        tl.store(target + i, value, mask=i < width)


@triton.jit
def admit(
    record,
    alive,
    seq_len,
    block_table,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    logprobs,
    min_position,
    max_position,
    stop_ids,
    bias_count,
    bias_ids,
    bias_values,
    has_allowed,
    allowed,
    MAX_BLOCKS: tl.constexpr,
    MAX_STOP_IDS: tl.constexpr,
    MAX_BIAS: tl.constexpr,
    ALLOWED_WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One record, by one program: every parameter of the row, an empty block table, and the row is alive."""
    head = tl.load(record + tl.arange(0, 16), volatile=True)
    slot = word(head, _SLOT).to(tl.int64)
    tl.store(temperature + slot, word(head, _TEMPERATURE).to(tl.float32, bitcast=True))
    tl.store(top_k + slot, word(head, _TOP_K))
    tl.store(top_p + slot, word(head, _TOP_P).to(tl.float32, bitcast=True))
    tl.store(min_p + slot, word(head, _MIN_P).to(tl.float32, bitcast=True))
    low = word(head, _SEED_LOW).to(tl.int64) & 0xFFFFFFFF
    tl.store(seed + slot, (word(head, _SEED_HIGH).to(tl.int64) << 32) | low)
    tl.store(logprobs + slot, word(head, _LOGPROBS))
    tl.store(min_position + slot, word(head, _MIN_POSITION))
    tl.store(max_position + slot, word(head, _MAX_POSITION))
    stops = word(head, _STOP_IDS)
    biases = word(head, _BIAS)
    mask_words = word(head, _ALLOWED_WORDS)
    tl.store(bias_count + slot, biases)
    tl.store(has_allowed + slot, (mask_words > 0).to(tl.int8))
    lists = record + _ADMIT_WORDS
    _copy(lists, stop_ids + slot * MAX_STOP_IDS, stops, -1, MAX_STOP_IDS, TILE)
    lists += stops
    _copy(lists, bias_ids + slot * MAX_BIAS, biases, 0, biases, TILE)
    lists += biases
    _copy(lists, bias_values + slot * MAX_BIAS, biases, 0, biases, TILE)
    lists += biases
    _copy(lists, allowed + slot * ALLOWED_WORDS, mask_words, 0, mask_words, TILE)
    lists += mask_words
    _copy(lists, block_table + slot * MAX_BLOCKS, word(head, _BLOCKS), 0, MAX_BLOCKS, TILE)
    tl.store(seq_len + slot, 0)
    tl.store(alive + slot, tl.full((), 1, tl.int8))
