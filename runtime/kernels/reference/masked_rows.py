"""Rows whose tokens are restricted only by a grammar's mask: extracts the allowed logits.

A mask mostly allows few tokens. These are gathered, without a vocabulary-sized boolean mask or copy of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

FEW: Final = 64  # tokens


@dataclass(frozen=True, slots=True)
class Left:
    """The allowed tokens of r rows, each in one of `none`, `few` and `many`. Ascending."""

    none: I64  # rows without an allowed token
    few: I64  # [f] rows with one to FEW
    count: I64  # [f] how many
    row: I64  # [c] of each of their tokens: the row
    token: I64  # [c] its id, ascending within a row
    distance: F32  # [c] its logit, less the highest that is left to the row
    likeliest: I64  # [f] the token with that one, the lowest id among equals
    many: I64  # [m] all other rows
    logits: F32  # [m, vocab] of these, -inf where a token may not come


def left_by_masks(raw: F32, words: NDArray[np.int32], rows: I64, whole: NDArray[np.bool_]) -> Left:
    """Classify rows by their allowed tokens. raw: [n, vocab], all finite in `rows`. rows: [r], ascending. words: their
    masks, [r, ceil(vocab / 32)]. whole: rows that count as `many` unless they have no token. [r]
    """
    vocab_size = raw.shape[1]
    # A nonzero word has at least one token: rows with few nonzero words are candidates, and only they are expanded.
    sparse = np.flatnonzero(np.count_nonzero(words, axis=1) <= FEW)
    nth, word = words[sparse].nonzero()
    spread = np.unpackbits(words[sparse[nth], word, None].view(np.uint8), axis=1, bitorder="little")
    index, bit = spread.nonzero()
    token = 32 * word[index] + bit
    inside = token < vocab_size
    nth, token = sparse[nth[index[inside]]], token[inside]
    count = np.bincount(nth, minlength=rows.size)
    is_none = np.zeros(rows.size, np.bool_)
    is_none[sparse] = count[sparse] == 0
    is_few = (count > 0) & (count <= FEW) & ~whole
    is_many = ~is_none & ~is_few
    kept = is_few[nth]
    nth, token = nth[kept], token[kept]
    logit = raw[rows[nth], token]
    first = np.flatnonzero(np.diff(nth, prepend=-1))
    high = np.maximum.reduceat(logit, first) if first.size else logit
    distance = logit - np.repeat(high, count[is_few])
    best = np.flatnonzero(distance == 0)
    return Left(
        none=rows[is_none],
        few=rows[is_few],
        count=count[is_few],
        row=rows[nth],
        token=token,
        distance=distance,
        likeliest=token[best[np.unique(nth[best], return_index=True)[1]]],
        many=rows[is_many],
        logits=np.where(_spread(words[is_many], vocab_size), raw[rows[is_many]], np.float32(-np.inf)),
    )


def _spread(words: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Expand masks to booleans. [m, vocab]"""
    return np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)
