"""Reads grammar-forced tokens on a GPU like `MaskMemory.read_forced`, from the mask worker's memory.

A row's line of forced tokens is read once and validated by that copy. Errors are harmless: proposals are verified under
masks like any draft.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.row_state.grammar_masks import acquired
from runahead.runtime.kernels.triton.row_state.record import word
from runahead.runtime.masks import mask_memory

_EPOCH = tl.constexpr(mask_memory.EPOCH)
_POSITION = tl.constexpr(mask_memory.POSITION)
_RUN = tl.constexpr(mask_memory.RUN)
_CHECKSUM = tl.constexpr(mask_memory.CHECKSUM)
_TAG_WORDS = tl.constexpr(mask_memory.TAG_WORDS)
_BASIS = tl.constexpr(mask_memory.BASIS)


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
