"""Proposes grammar-forced tokens on a GPU like `MaskMemory.read_forced`, from the mask worker's memory.

A row's line of forced tokens is read once and validated by that copy. Errors are harmless: proposals are verified under
masks like any draft.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runahead.runtime.drafters.ngram import NO_DRAFT
from runahead.runtime.kernels.row_state import RowState
from runahead.runtime.kernels.triton.row_state.drafts import DraftState
from runahead.runtime.kernels.triton.row_state.grammar_masks import MaskState, acquired
from runahead.runtime.kernels.triton.row_state.record import int_of, long_of, offset_of, word
from runahead.runtime.masks import mask_memory

_MASK_EPOCH = offset_of("mask_epoch")
_MAX_POSITION = offset_of("max_position")
_EPOCH = tl.constexpr(mask_memory.EPOCH)
_POSITION = tl.constexpr(mask_memory.POSITION)
_RUN = tl.constexpr(mask_memory.RUN)
_CHECKSUM = tl.constexpr(mask_memory.CHECKSUM)
_TAG_WORDS = tl.constexpr(mask_memory.TAG_WORDS)
_BASIS = tl.constexpr(mask_memory.BASIS)
_NO_DRAFT = tl.constexpr(NO_DRAFT)


@triton.jit
def forced_tokens(
    line, weights, epoch, length, newest, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, MOST_PAD: tl.constexpr,
    ACQUIRE: tl.constexpr,
):  # fmt: skip
    """Return how many tokens must follow the first `length` tokens of a row, whose last one is `newest`, and the first
    MOST_PAD of them, [MOST_PAD], if the row's line is valid.
    """
    if ACQUIRE:
        acquired(line + _POSITION)  # later loads are as new as the newest visible tag
    w = tl.arange(0, WORDS_PAD)
    words = tl.load(line + w, mask=w < WORDS, other=0, volatile=True)  # the only read
    summed = tl.sum(words * tl.load(weights + w, mask=w < WORDS, other=0), 0) ^ _BASIS
    ahead = length.to(tl.int64) - word(words, _POSITION)
    known = word(words, _RUN)
    is_own = (word(words, _EPOCH) == epoch) & (ahead >= 0) & (ahead < known) & (word(words, _CHECKSUM) == summed)
    ahead = tl.where(is_own, ahead, 0).to(tl.int32)
    left = tl.where(is_own, known, 0).to(tl.int32) - ahead
    first = 2 * (w - _TAG_WORDS)  # of the two tokens in a word
    one, other = words.to(tl.int32), (words >> 32).to(tl.int32)
    before = tl.sum(tl.where(first == ahead - 1, one, 0) + tl.where(first + 1 == ahead - 1, other, 0), 0)
    goes_on = (ahead == 0) | (before == newest)  # the row continued as forced
    wanted = (ahead + tl.arange(0, MOST_PAD))[:, None]
    found = tl.where(first[None, :] == wanted, one[None, :], 0)
    found += tl.where((first + 1)[None, :] == wanted, other[None, :], 0)
    return tl.where(goes_on, left, 0), tl.sum(found, 1)


@triton.jit(do_not_specialize=["count"])
def _forced_kernel(
    row_slots,
    alive,
    seq_len,
    last_token,
    parameters,
    held,
    lines,
    weights,
    proposed,
    drafted,
    forced,
    count,
    KEPT: tl.constexpr,
    MOST: tl.constexpr,
    MOST_PAD: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr,
    ACQUIRE: tl.constexpr,
):
    """Propose one row's forced tokens. KEPT: number of the lowest row slots that get proposals."""
    slot = tl.load(row_slots + tl.program_id(0)).to(tl.int64)
    if tl.load(held + slot) == 0:  # a held row keeps the drafts of an earlier F
        length = tl.where(tl.load(alive + slot) != 0, tl.load(seq_len + slot), 0)
        epoch = long_of(parameters, slot, _MASK_EPOCH)
        n = tl.arange(0, MOST_PAD)
        left = tl.full([], 0, tl.int32)
        said = tl.zeros([MOST_PAD], tl.int32)
        if (length > 0) & (epoch != 0):
            left, said = forced_tokens(
                lines + slot * WORDS, weights, epoch, length, tl.load(last_token + slot), WORDS, WORDS_PAD, MOST_PAD,
                ACQUIRE,
            )  # fmt: skip
        # A token at the row's last position ends it, and no block is allocated for a later one.
        there = n < tl.minimum(left, tl.minimum(int_of(parameters, slot, _MAX_POSITION) - length, count))
        there = there & (slot < KEPT)
        tl.store(proposed + slot * MOST + n, tl.where(there, said, _NO_DRAFT), mask=n < MOST)
        tl.store(drafted + slot, tl.sum(there.to(tl.int32), 0))
        tl.store(forced + slot, (left > 0).to(tl.int8))


def propose_forced(
    num_rows: int, count: int, row_slots: torch.Tensor, state: RowState, drafts: DraftState, masks: MaskState
) -> None:
    """Propose up to `count` grammar-forced tokens for each of the first `num_rows` entries of the row list, all of
    which decode. For programs without a drafter.

    row_slots: int32 [R]. Rows without a grammar, ended rows, rows whose runs are not kept and entries past the list get
    no drafts; a held row keeps its drafts. Nothing is proposed at or beyond a row's end.
    """
    most, words = drafts.most, masks.forced.shape[1]
    assert 0 < count <= most
    _forced_kernel[(num_rows,)](
        row_slots,
        state.alive.view(torch.int8),
        state.seq_len,
        state.last_token,
        state.parameters,
        masks.held,
        masks.forced,
        masks.weights,
        drafts.proposed,
        drafts.drafted,
        drafts.forced,
        count,
        KEPT=drafts.kept_slots,
        MOST=most,
        MOST_PAD=triton.next_power_of_2(most),
        WORDS=words,
        WORDS_PAD=triton.next_power_of_2(words),
        ACQUIRE=masks.held.device.type != "cpu",
        num_warps=1,
    )
