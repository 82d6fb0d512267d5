"""Penalties on the device, with the bits of `reference.penalties` for kernels launched without fused operations."""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime import row_record as layout
from runahead.runtime.kernels.triton.row_state.record import float_of, int_of, offset_of

_PENALTY_SLOT = offset_of("penalty_slot")
_REPETITION_PENALTY = offset_of("repetition_penalty")
_PRESENCE_PENALTY = offset_of("presence_penalty")
_FREQUENCY_PENALTY = offset_of("frequency_penalty")
_COUNT_TOKEN = tl.constexpr(layout.COUNT_TOKEN)
_COUNT_SEEN = tl.constexpr(layout.COUNT_SEEN)
_COUNT_WORDS = tl.constexpr(layout.COUNT_WORDS)
_PROMPT_BIT = tl.constexpr(layout.PROMPT_BIT)
_TILE, _CLEAR_TILE = tl.constexpr(256), tl.constexpr(2048)


@triton.jit
def penalize(
    x, i, inside, slot, parameters, penalties, mask_words, drafts, ahead, VOCAB: tl.constexpr, VERIFIES: tl.constexpr
):
    """Return the logits x of tokens i after the row's penalties, if any. VERIFIES: the first `ahead` drafts of the row
    count too.
    """
    own = int_of(parameters, slot, _PENALTY_SLOT).to(tl.int64)
    there = inside & (own >= 0)
    times = tl.load(penalties.counts + own * VOCAB + i, mask=there, other=0)
    word = tl.load(penalties.in_prompt + own * mask_words + i // 32, mask=there, other=0)
    if VERIFIES:
        for before in range(0, tl.where(own >= 0, ahead, 0)):
            times += (i == tl.load(drafts + before)).to(tl.int32)
    said = times > 0
    factor = float_of(parameters, slot, _REPETITION_PENALTY)
    repeated = tl.where(x > 0.0, tl.div_rn(x, factor + tl.zeros_like(x)), x * factor)
    x = tl.where(said | (((word >> (i % 32)) & 1) != 0), repeated, x)
    x = tl.where(said, x - float_of(parameters, slot, _FREQUENCY_PENALTY) * times.to(tl.float32), x)
    return tl.where(said, x - float_of(parameters, slot, _PRESENCE_PENALTY), x)


@triton.jit
def begin_penalties(entries, count, penalty_slot, penalties, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr):
    """Clear a penalty slot, then write a penalty list of `count` entries there, in one program."""
    times = penalties.counts + penalty_slot * VOCAB
    mask = penalties.in_prompt + penalty_slot * MASK_WORDS
    for first in range(0, VOCAB, _CLEAR_TILE):
        i = first + tl.arange(0, _CLEAR_TILE)
        tl.store(times + i, tl.zeros([_CLEAR_TILE], tl.int32), mask=i < VOCAB)
        tl.store(mask + i, tl.zeros([_CLEAR_TILE], tl.int32), mask=i < MASK_WORDS)
    tl.debug_barrier()  # other threads write the list than cleared it
    for first in range(0, count, _TILE):
        e = first + tl.arange(0, _TILE)
        inside = e < count
        token = tl.load(entries + e * _COUNT_WORDS + _COUNT_TOKEN, mask=inside, other=0, volatile=True)
        seen = tl.load(entries + e * _COUNT_WORDS + _COUNT_SEEN, mask=inside, other=0, volatile=True)
        tl.store(times + token, seen & ~_PROMPT_BIT, mask=inside)
        bit = tl.full([_TILE], 1, tl.int32) << (token % 32)
        tl.atomic_or(mask + token // 32, bit, mask=inside & ((seen & _PROMPT_BIT) != 0), sem="relaxed")
