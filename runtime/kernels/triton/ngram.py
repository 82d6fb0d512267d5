"""Prompt lookup on a GPU: `runahead.runtime.drafters.ngram`, from the history that lies there. One program a row."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.drafters import ngram
from runahead.runtime.drafters.drafter import NO_DRAFT
from runahead.runtime.kernels.row_state import RowState
from runahead.runtime.kernels.triton.draft_state import DraftState
from runahead.runtime.kernels.triton.row_parameters import int_of, place_of

_TILE: Final = 2048  # positions that a program looks at together
_MAX_POSITION = place_of("max_position")
_LONGEST = tl.constexpr(ngram.LONGEST)
_NO_DRAFT = tl.constexpr(NO_DRAFT)


@triton.jit(do_not_specialize=["count"])
def _ngram_kernel(
    row_slots,
    alive,
    seq_len,
    parameters,
    history,
    proposed,
    drafted,
    count,
    CONTEXT: tl.constexpr,
    MOST: tl.constexpr,
    MOST_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    slot = tl.load(row_slots + tl.program_id(0)).to(tl.int64)
    length = tl.where(tl.load(alive + slot) != 0, tl.load(seq_len + slot), 0)
    # A token at the row's last position ends it, and nobody has a block for what would lie there.
    room = tl.minimum(int_of(parameters, slot, _MAX_POSITION) - length, count)
    own = history + slot * CONTEXT
    last = length - 1
    best = tl.zeros([TILE], tl.int32)
    for first in range(0, tl.where(room > 0, last, 0), TILE):
        place = first + tl.arange(0, TILE)
        inside = place < last
        agrees = inside & (tl.load(own + place, mask=inside, other=_NO_DRAFT) == tl.load(own + last))
        agreeing = agrees.to(tl.int32)
        for back in tl.static_range(1, _LONGEST):
            there = agrees & (place >= back)
            before = tl.load(own + place - back, mask=there, other=_NO_DRAFT)
            agrees = there & (before == tl.load(own + tl.maximum(last - back, 0)))
            agreeing += agrees.to(tl.int32)
        # Most tokens that agree first, then the latest place: the position that follows it is below CONTEXT.
        best = tl.maximum(best, tl.where(agreeing > 0, agreeing * CONTEXT + place + 1, 0))
    found = tl.max(best, 0)
    agreeing, follows = found // CONTEXT, found % CONTEXT
    n = tl.arange(0, MOST_PAD)
    there = (found > 0) & (n < room)
    there = there & ((agreeing == _LONGEST) | (n < (1 << tl.maximum(agreeing - 1, 0))))
    source = follows + n % tl.maximum(length - follows, 1)
    token = tl.load(own + source, mask=there, other=_NO_DRAFT)
    tl.store(proposed + slot * MOST + n, token, mask=n < MOST)
    tl.store(drafted + slot, tl.sum(there.to(tl.int32), 0))


def propose_ngrams(num_rows: int, count: int, row_slots: torch.Tensor, state: RowState, drafts: DraftState) -> None:
    """Propose up to `count` tokens for each of the first `num_rows` places of the row list, all of which decode.

    row_slots: int32 [R]. A row that has ended, and a place past the list, has no drafts. What would lie at a row's end
    or beyond it is left out.
    """
    context, most = drafts.history.shape[1], drafts.most
    assert 0 < count <= most
    _ngram_kernel[(num_rows,)](
        row_slots,
        state.alive.view(torch.int8),
        state.seq_len,
        state.parameters,
        drafts.history,
        drafts.proposed,
        drafts.drafted,
        count,
        CONTEXT=context,
        MOST=most,
        MOST_PAD=triton.next_power_of_2(most),
        TILE=min(_TILE, triton.next_power_of_2(context)),
        num_warps=8,
    )
