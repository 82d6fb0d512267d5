"""Copies an admission record from the bulk slot into the row state, inside `apply_plan`'s kernel."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.row_state.record import ROW_WORDS, offset_of, word
from runahead.runtime.kernels.triton.sampling.penalties import begin_penalties
from runahead.runtime.row_record import COUNT_WORDS

_ROW_SLOT = offset_of("row_slot")
_STOP_COUNT = offset_of("stop_count")
_BIAS_COUNT = offset_of("bias_count")
_ALLOWED_WORDS = offset_of("allowed_words")
_BLOCK_COUNT = offset_of("block_count")
_PENALTY_SLOT = offset_of("penalty_slot")
_PENALTY_ENTRIES = offset_of("penalty_entries")
_HISTORY_COUNT = offset_of("history_count")
_COUNT_WORDS = tl.constexpr(COUNT_WORDS)


@triton.jit
def _copy(source, target, count, fill, width, TILE: tl.constexpr):
    """Copy target[:count] = source[:count] and fill target[count:width]. 32-bit words."""
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
    parameters,
    stop_ids,
    bias_ids,
    bias_values,
    allowed,
    counts,
    in_prompt,
    history,
    held,
    VOCAB: tl.constexpr,
    CONTEXT: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    MAX_STOP_IDS: tl.constexpr,
    MAX_BIAS: tl.constexpr,
    ALLOWED_WORDS: tl.constexpr,
    HOLDS: tl.constexpr,
    TILE: tl.constexpr,
    CLEAR_TILE: tl.constexpr,
):
    """Apply one record in one program: parameters, lists, blocks and penalty counts; the row becomes alive. CONTEXT:
    above 0 if a drafter reads the row's first tokens. HOLDS: rows may be held; this one is not.
    """
    w = tl.arange(0, ROW_WORDS)
    head = tl.load(record + w, volatile=True)
    slot = word(head, _ROW_SLOT).to(tl.int64)
    tl.store(parameters + slot * ROW_WORDS + w, head)
    stops = word(head, _STOP_COUNT)
    biases = word(head, _BIAS_COUNT)
    mask_words = word(head, _ALLOWED_WORDS)
    blocks = word(head, _BLOCK_COUNT)
    lists = record + ROW_WORDS
    _copy(lists, stop_ids + slot * MAX_STOP_IDS, stops, -1, MAX_STOP_IDS, TILE)
    lists += stops
    _copy(lists, bias_ids + slot * MAX_BIAS, biases, 0, biases, TILE)
    lists += biases
    _copy(lists, bias_values + slot * MAX_BIAS, biases, 0, biases, TILE)
    lists += biases
    _copy(lists, allowed + slot * ALLOWED_WORDS, mask_words, 0, mask_words, TILE)
    lists += mask_words
    _copy(lists, block_table + slot * MAX_BLOCKS, blocks, 0, MAX_BLOCKS, TILE)
    lists += blocks
    own = word(head, _PENALTY_SLOT)
    entries = word(head, _PENALTY_ENTRIES)
    if own >= 0:
        begin_penalties(lists, entries, own.to(tl.int64), counts, in_prompt, VOCAB, ALLOWED_WORDS, CLEAR_TILE, TILE)
    if CONTEXT > 0:
        first_tokens = word(head, _HISTORY_COUNT)
        lists += entries * _COUNT_WORDS
        _copy(lists, history + slot * CONTEXT, first_tokens, 0, first_tokens, TILE)
    tl.store(seq_len + slot, 0)
    if HOLDS:
        tl.store(held + slot, tl.full((), 0, tl.int8))
    tl.store(alive + slot, tl.full((), 1, tl.int8))
