"""Where the mask of each row's next position lies: memory that the mask worker writes and S reads.

A line for each row slot, a tag and the mask behind it. The tag says which mask it is (the row's epoch, the position of
the token that it is for) and what it is the tag of (a checksum over itself and the mask). S reads a line once, and
judges by that copy alone: what changes in the memory afterwards changes no verdict. A copy made while the line was
being written has a checksum that does not fit, whatever order the stores of another processor become seen in.
"""

from __future__ import annotations

import mmap
import zlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.rounding import ceil_div
from runahead.runtime.token_mask import mask_words

# Words of 64 bits at the beginning of a line.
_EPOCH: Final = 0
_POSITION: Final = 1
_CHECKSUM: Final = 2
_TAG_WORDS: Final = 3

# Words of 64 bits at the beginning of the memory: what the worker has done so far. It alone writes them.
HANDLED: Final = 0  # orders
MASKS: Final = 1  # written
MASK_NS: Final = 2  # that these took
COMPILED: Final = 3  # grammars
COMPILE_NS: Final = 4  # that these took
FOUND: Final = 5  # grammars that had been compiled before
_FIGURES: Final = 8


class MaskMemory:
    """max_rows: row slots. memory: a file's descriptor, of `MaskMemory.size(...)` bytes, which processes share; None is
    for one process alone."""

    def __init__(self, max_rows: int, vocab_size: int, memory: int | None = None) -> None:
        size = self.size(max_rows, vocab_size)
        # The map keeps its file; with -1 it has none.
        words = np.frombuffer(mmap.mmap(-1 if memory is None else memory, size), np.int64)
        self.figures: NDArray[np.int64] = words[:_FIGURES]
        self._lines = words[_FIGURES:].reshape(max_rows, -1)
        self._mask_words = mask_words(vocab_size)

    @staticmethod
    def size(max_rows: int, vocab_size: int) -> int:
        """Bytes of the lines of so many row slots."""
        return 8 * (_FIGURES + max_rows * (_TAG_WORDS + ceil_div(mask_words(vocab_size), 2)))

    def write(self, slot: int, epoch: int, position: int, mask: NDArray[np.int32]) -> None:
        """The tokens that may come at a position of the row that has had the slot since this epoch. mask: as
        `runahead.runtime.token_mask` lays it out, [mask_words(vocab)]"""
        line = np.zeros(self._lines.shape[1], np.int64)
        line[_EPOCH], line[_POSITION] = epoch, position
        line[_TAG_WORDS:].view(np.int32)[: mask.size] = mask
        line[_CHECKSUM] = _checksum(line)
        self._lines[slot] = line

    def read(self, slot: int, epoch: int, position: int) -> NDArray[np.int32] | None:
        """That mask, a copy; None while it is not there. [mask_words(vocab)]"""
        line = self._lines[slot].copy()  # the only look at what another process writes
        if line[_EPOCH] != epoch or line[_POSITION] != position or line[_CHECKSUM] != _checksum(line):
            return None
        mask: NDArray[np.int32] = line[_TAG_WORDS:].view(np.int32)[: self._mask_words]
        return mask


def _checksum(line: NDArray[np.int64]) -> int:
    """Of everything in a line but the checksum."""
    return zlib.crc32(line[_TAG_WORDS:].data, zlib.crc32(line[:_CHECKSUM].data))
