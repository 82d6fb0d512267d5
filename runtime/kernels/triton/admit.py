"""Admission on the device: a record of the bulk slot goes into the row state. Called by `take_plan`'s kernel."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runtime import plan as layout
from runtime.kernels.triton.penalties import begin_penalties

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
_PROMPT_LOGPROBS = tl.constexpr(layout.ADMIT_PROMPT_LOGPROBS)
_REPETITION = tl.constexpr(layout.ADMIT_REPETITION)
_PRESENCE = tl.constexpr(layout.ADMIT_PRESENCE)
_FREQUENCY = tl.constexpr(layout.ADMIT_FREQUENCY)
_PENALTY_SLOT = tl.constexpr(layout.ADMIT_PENALTY_SLOT)
_COUNTS = tl.constexpr(layout.ADMIT_COUNTS)
_ADMIT_WORDS = tl.constexpr(layout.ADMIT_WORDS)


@triton.jit
def word(words, index: tl.constexpr):
    """One word of a header that is in registers."""
    return tl.sum(tl.where(tl.arange(0, words.shape[0]) == index, words, 0), 0)


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
    prompt_logprobs,
    repetition,
    presence,
    frequency,
    penalty_slot,
    counts,
    in_prompt,
    VOCAB: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    MAX_STOP_IDS: tl.constexpr,
    MAX_BIAS: tl.constexpr,
    ALLOWED_WORDS: tl.constexpr,
    TILE: tl.constexpr,
    CLEAR_TILE: tl.constexpr,
):
    """One record, by one program: every parameter of the row, the blocks and what was said that the record names, and
    the row is alive."""
    head = tl.load(record + tl.arange(0, _ADMIT_WORDS), volatile=True)
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
    blocks = word(head, _BLOCKS)
    _copy(lists, block_table + slot * MAX_BLOCKS, blocks, 0, MAX_BLOCKS, TILE)
    lists += blocks
    tl.store(prompt_logprobs + slot, word(head, _PROMPT_LOGPROBS))
    tl.store(repetition + slot, word(head, _REPETITION).to(tl.float32, bitcast=True))
    tl.store(presence + slot, word(head, _PRESENCE).to(tl.float32, bitcast=True))
    tl.store(frequency + slot, word(head, _FREQUENCY).to(tl.float32, bitcast=True))
    own = word(head, _PENALTY_SLOT)
    tl.store(penalty_slot + slot, own)
    if own >= 0:
        begin_penalties(
            lists, word(head, _COUNTS), own.to(tl.int64), counts, in_prompt, VOCAB, ALLOWED_WORDS, CLEAR_TILE, TILE
        )
    tl.store(seq_len + slot, 0)
    tl.store(alive + slot, tl.full((), 1, tl.int8))
