"""A set of tokens as a mask of bits, as a row's record and the row state hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.rounding import ceil_div


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits in a mask with a bit for each token of the vocabulary."""
    return ceil_div(vocab_size, 32)


def token_mask(token_ids: Sequence[int] | NDArray[np.integer[Any]], vocab_size: int) -> NDArray[np.int32]:
    """A bit for each token of the vocabulary: bit v % 32 of word v // 32. [mask_words(vocab_size)]"""
    said = np.zeros(32 * mask_words(vocab_size), np.bool_)
    said[np.asarray(token_ids, np.int64)] = True
    return np.packbits(said, bitorder="little").view("<i4")
