"""A set of tokens as a bit mask, as in a row's record and the row state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.rounding import ceil_div


def mask_words(vocab_size: int) -> int:
    """Return the 32-bit words of a mask over the vocabulary."""
    return ceil_div(vocab_size, 32)


def token_mask(token_ids: Sequence[int] | NDArray[np.integer[Any]], vocab_size: int) -> NDArray[np.int32]:
    """Make a mask: bit v % 32 of word v // 32 for token v. [mask_words(vocab_size)]"""
    said = np.zeros(32 * mask_words(vocab_size), np.bool_)
    said[np.asarray(token_ids, np.int64)] = True
    return np.packbits(said, bitorder="little").view("<i4")
