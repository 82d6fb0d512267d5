"""Proposes drafts on a GPU: by prompt lookup like `runahead.runtime.drafters.ngram`, from the token history on the
device, and grammar-forced tokens, which take precedence. One program a row.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from runahead.runtime.drafters import ngram
from runahead.runtime.drafters.ngram import NO_DRAFT
from runahead.runtime.kernels.triton.drafting.forced import forced_tokens
from runahead.runtime.kernels.triton.row_state.record import int_of, long_of, offset_of

LOOKUP_TILE: Final = 2048  # positions of a tile
_MAX_POSITION = offset_of("max_position")
_MASK_EPOCH = offset_of("mask_epoch")
_LONGEST = tl.constexpr(ngram.LONGEST)
_NO_DRAFT = tl.constexpr(NO_DRAFT)


@triton.jit
def _prompt_lookup(own, length, room, n, CONTEXT: tl.constexpr, TILE: tl.constexpr):
    """Return whether there are drafts number `n`, up to `room`, and these tokens. own: the row's history."""
    last = length - 1
    best = tl.zeros([TILE], tl.int32)
    for first in range(0, tl.where(room > 0, last, 0), TILE):
        index = first + tl.arange(0, TILE)
        inside = index < last
        agrees = inside & (tl.load(own + index, mask=inside, other=_NO_DRAFT) == tl.load(own + last))
        agreeing = agrees.to(tl.int32)
        for back in tl.static_range(1, _LONGEST):
            there = agrees & (index >= back)
            before = tl.load(own + index - back, mask=there, other=_NO_DRAFT)
            agrees = there & (before == tl.load(own + tl.maximum(last - back, 0)))
            agreeing += agrees.to(tl.int32)
        # The longest match first, then the latest: its next position is below CONTEXT.
        best = tl.maximum(best, tl.where(agreeing > 0, agreeing * CONTEXT + index + 1, 0))
    found = tl.max(best, 0)
    agreeing, follows = found // CONTEXT, found % CONTEXT
    there = (found > 0) & (n < room)
    there = there & ((agreeing == _LONGEST) | (n < (1 << tl.maximum(agreeing - 1, 0))))
    source = follows + n % tl.maximum(length - follows, 1)
    return there, tl.load(own + source, mask=there, other=_NO_DRAFT)


@triton.jit(do_not_specialize=["count"])
def propose_kernel(
    row_slots, state, drafts, masks, count, SIZES: tl.constexpr, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr,
    ACQUIRE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Propose one row's drafts. CONTEXT: 0: no prompt lookup. masks: rows may be held and have grammars, whose
    forced tokens take precedence; slots from KEPT on get none.
    """
    DRAFTS_PAD: tl.constexpr = SIZES.DRAFTS_PAD
    slot = tl.load(row_slots + tl.program_id(0)).to(tl.int64)
    length = tl.where(tl.load(state.alive + slot) != 0, tl.load(state.seq_len + slot), 0)
    # A token at the row's last position ends it, and no block is allocated for a later one.
    room = tl.minimum(int_of(state.parameters, slot, _MAX_POSITION) - length, count)
    if masks is not None:
        room = tl.where(slot < SIZES.KEPT, room, 0)
        most = room  # of forced tokens
        is_held = tl.load(masks.held + slot) != 0  # it keeps the drafts of an earlier F
        epoch = long_of(state.parameters, slot, _MASK_EPOCH)
        left = tl.full([], 0, tl.int32)
        said = tl.zeros([DRAFTS_PAD], tl.int32)
        if (length > 0) & (epoch != 0) & (is_held == 0):
            left, said = forced_tokens(
                masks.forced + slot * WORDS, masks.weights, epoch, length, tl.load(state.last_token + slot), WORDS,
                WORDS_PAD, DRAFTS_PAD, ACQUIRE,
            )  # fmt: skip
        room = tl.where((left > 0) | is_held, 0, tl.minimum(room, tl.load(drafts.guesses)))
    n = tl.arange(0, DRAFTS_PAD)
    there = n < 0
    token = tl.full([DRAFTS_PAD], _NO_DRAFT, tl.int32)
    if SIZES.CONTEXT > 0:
        there, token = _prompt_lookup(drafts.history + slot * SIZES.CONTEXT, length, room, n, SIZES.CONTEXT, TILE)
    if masks is not None:
        is_forced = (left > 0) & (n < tl.minimum(left, most))
        there = there | is_forced
        token = tl.where(is_forced, said, token)
        tl.store(drafts.proposed + slot * SIZES.DRAFTS + n, token, mask=(n < SIZES.DRAFTS) & (is_held == 0))
        tl.store(drafts.drafted + slot, tl.sum(there.to(tl.int32), 0), mask=is_held == 0)
        tl.store(drafts.forced + slot, (left > 0).to(tl.int8), mask=is_held == 0)
    else:
        tl.store(drafts.proposed + slot * SIZES.DRAFTS + n, token, mask=n < SIZES.DRAFTS)
        tl.store(drafts.drafted + slot, tl.sum(there.to(tl.int32), 0))
