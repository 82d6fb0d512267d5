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
_TILE = tl.constexpr(256)


@triton.jit
def _copy(source, target, count, fill, width):
    """Copy target[:count] = source[:count] and fill target[count:width]. 32-bit words."""
    for first in range(0, width, _TILE):
        i = first + tl.arange(0, _TILE)
        value = tl.load(source + i, mask=i < count, other=fill, volatile=True)
        tl.store(target + i, value, mask=i < width)


@triton.jit
def admit(record, state, penalties, history, held, SIZES: tl.constexpr):
    """Apply one record in one program: parameters, lists, blocks and penalty counts; the row becomes alive and is not
    held. history: if a drafter reads the row's first tokens, CONTEXT of a row.
    """
    w = tl.arange(0, ROW_WORDS)
    head = tl.load(record + w, volatile=True)
    slot = word(head, _ROW_SLOT).to(tl.int64)
    tl.store(state.parameters + slot * ROW_WORDS + w, head)
    stops = word(head, _STOP_COUNT)
    biases = word(head, _BIAS_COUNT)
    mask_words = word(head, _ALLOWED_WORDS)
    blocks = word(head, _BLOCK_COUNT)
    lists = record + ROW_WORDS
    _copy(lists, state.stop_ids + slot * SIZES.MAX_STOP_IDS, stops, -1, SIZES.MAX_STOP_IDS)
    lists += stops
    _copy(lists, state.bias_ids + slot * SIZES.MAX_BIAS, biases, 0, biases)
    lists += biases
    bias_words = state.bias_values.to(tl.pointer_type(tl.int32), bitcast=True)
    _copy(lists, bias_words + slot * SIZES.MAX_BIAS, biases, 0, biases)
    lists += biases
    _copy(lists, state.allowed + slot * SIZES.ALLOWED_WORDS, mask_words, 0, mask_words)
    lists += mask_words
    _copy(lists, state.block_table + slot * SIZES.TABLE, blocks, 0, SIZES.TABLE)
    lists += blocks
    own = word(head, _PENALTY_SLOT)
    entries = word(head, _PENALTY_ENTRIES)
    if own >= 0:
        begin_penalties(lists, entries, own.to(tl.int64), penalties, SIZES.VOCAB, SIZES.ALLOWED_WORDS)
    if history is not None:
        first_tokens = word(head, _HISTORY_COUNT)
        lists += entries * _COUNT_WORDS
        _copy(lists, history + slot * SIZES.CONTEXT, first_tokens, 0, first_tokens)
    tl.store(state.seq_len + slot, 0)
    if held is not None:
        tl.store(held + slot, tl.full((), 0, tl.int8))
    tl.store(state.alive + slot, tl.full((), 1, tl.int8))
