"""Shared memory of masks: written by the mask worker, read by S and the drafter.

Each row slot has a line for the mask of the row's next position, and one for each following position that drafts may
reach. A line is a tag and a mask. The tag has the row's epoch, the row's next position, the drafts before the mask's
position, and a checksum over itself and the mask. A reader copies a line once and validates the copy, so later writes
don't matter. A copy made during a write has a wrong checksum, whatever order another processor's stores become visible
in. The checksum is a sum that a GPU can compute in any order.

A slot also has the tokens that the grammar forces from the row's next position on, with the same kind of tag. They are
only proposals, verified under masks like any draft.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.rounding import ceil_div
from runahead.runtime.row_record import mask_words

# 64-bit words at a line's beginning.
EPOCH: Final = 0
POSITION: Final = 1
RUN: Final = 2  # drafts between that position and the mask's
CHECKSUM: Final = 3
TAG_WORDS: Final = 4
# Then the drafts, then the mask; a line of forced tokens has only tokens, and `RUN` is their number.

# 64-bit words at the memory's beginning: the worker's progress, written by the worker.
HANDLED: Final = 0  # orders
MASKS: Final = 1  # written
MASK_NS: Final = 2  # time of these
COMPILED: Final = 3  # grammars
COMPILE_NS: Final = 4  # time of these
FOUND: Final = 5  # grammars found compiled
ASKED: Final = 6  # grammars whose compilation was requested
_FIGURES: Final = 8

NO_RUN: Final = np.zeros(0, np.int32)
BASIS: Final = 0x2545F491  # the checksum of zeros, so that unwritten memory is not a valid line


class MaskMemory:
    """The memory. max_rows: row slots. drafts: most of a run. memory: a shared file's descriptor with
    `MaskMemory.size(...)` bytes; None for one process.
    """

    def __init__(self, max_rows: int, vocab_size: int, drafts: int = 0, memory: int | None = None) -> None:
        size = self.size(max_rows, vocab_size, drafts)
        # The map keeps its file; -1 means anonymous memory.
        self.words = words = np.frombuffer(mmap.mmap(-1 if memory is None else memory, size), np.int64)
        forced, end = _FIGURES, _FIGURES + max_rows * _forced_words(drafts)
        self.drafts = drafts
        self.most_forced = _most_forced(drafts)
        self.figures: NDArray[np.int64] = words[:_FIGURES]
        self.forced = words[forced:end].reshape(max_rows, -1)
        self.lines = words[end:].reshape(max_rows, 1 + drafts, -1)
        self._mask_words = mask_words(vocab_size)
        self.mask_at = TAG_WORDS + ceil_div(drafts, 2)  # index of the mask in a line

    @staticmethod
    def size(max_rows: int, vocab_size: int, drafts: int = 0) -> int:
        """Return the bytes for this many row slots."""
        line = TAG_WORDS + ceil_div(drafts, 2) + ceil_div(mask_words(vocab_size), 2)
        return 8 * (_FIGURES + max_rows * (_forced_words(drafts) + (1 + drafts) * line))

    def write_behind(
        self, slot: int, epoch: int, position: int, mask: NDArray[np.int32], run: NDArray[np.int32]
    ) -> None:
        """Write the tokens allowed after these drafts, [1 to `drafts`], of the row with this epoch and next position.
        mask: in the layout of `row_record.token_mask`, [mask_words(vocab)]
        """
        line = np.zeros(self.lines.shape[2], np.int64)
        line[EPOCH], line[POSITION], line[RUN] = epoch, position, run.size
        line[TAG_WORDS : self.mask_at].view(np.int32)[: run.size] = run
        line[self.mask_at :].view(np.int32)[: mask.size] = mask
        line[CHECKSUM] = _checksums(line)
        self.lines[slot, run.size] = line

    def write_next(self, tags: NDArray[np.int64], masks: NDArray[np.int32]) -> None:
        """Write the tokens allowed next, for several rows. tags: slot, epoch and position of each. [n, 3], [n,
        mask_words(vocab)]
        """
        lines = np.zeros((len(tags), self.lines.shape[2]), np.int64)
        lines[:, EPOCH], lines[:, POSITION] = tags[:, 1], tags[:, 2]
        lines[:, self.mask_at :].view(np.int32)[:, : masks.shape[1]] = masks
        lines[:, CHECKSUM] = _checksums(lines)
        self.lines[tags[:, 0], 0] = lines

    def read_behind(self, slot: int, epoch: int, position: int, run: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """Return a copy of the mask after these drafts; None if it is missing or after other drafts.
        [mask_words(vocab)]
        """
        line = self.lines[slot, run.size].copy()  # the only read of memory that another process writes
        if not _are_of(line[None], epoch, position, run.size):
            return None
        if not np.array_equal(line[TAG_WORDS : self.mask_at].view(np.int32)[: run.size], run):
            return None
        mask: NDArray[np.int32] = line[self.mask_at :].view(np.int32)[: self._mask_words]
        return mask

    def read_next(
        self, slots: NDArray[np.int64], epochs: NDArray[np.int64], positions: NDArray[np.int32]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
        """Return for several rows whether the next position's mask is there, and copies of the masks, undefined for
        missing ones. [n], [n], [n]; returns [n], [n, mask_words(vocab)]
        """
        lines = self.lines[slots, 0]  # the only read of memory that another process writes
        return _are_of(lines, epochs, positions, 0), lines[:, self.mask_at :].view(np.int32)[:, : self._mask_words]

    def write_forced(self, slot: int, epoch: int, position: int, tokens: Sequence[int]) -> None:
        """Write the tokens forced from this position of the row on, [at most `most_forced`]; empty: unknown."""
        line = np.zeros(self.forced.shape[1], np.int64)
        line[EPOCH], line[POSITION], line[RUN] = epoch, position, len(tokens)
        line[TAG_WORDS:].view(np.int32)[: len(tokens)] = tokens
        line[CHECKSUM] = _checksums(line)
        self.forced[slot] = line

    def read_forced(self, slot: int, epoch: int, position: int, newest: int, count: int) -> NDArray[np.int32]:
        """Return up to `count` tokens forced from this position on, if the row has followed the forced tokens. newest:
        its previous token. [n]
        """
        line = self.forced[slot].copy()  # the only read
        ahead, known = position - int(line[POSITION]), int(line[RUN])
        if line[EPOCH] != epoch or not 0 <= ahead < known or line[CHECKSUM] != _checksums(line):
            return NO_RUN
        return tokens_behind(line[TAG_WORDS:].view(np.int32)[:known], ahead, newest)[:count]


def tokens_behind(forced: NDArray[np.int32], ahead: int, newest: int) -> NDArray[np.int32]:
    """Return the forced tokens, [n], that are left after `ahead` more tokens of the row, the last of them `newest`.
    Used by the mask worker and the drafter.
    """
    if ahead < 0 or (0 < ahead <= forced.size and forced[ahead - 1] != newest):
        return NO_RUN
    return forced[ahead:]


def _most_forced(drafts: int) -> int:
    """Return the bound of forced tokens: one that S samples when they are first known, the ones that the next launch
    verifies, and one more.
    """
    return 2 * drafts + 2 if drafts else 0


def _forced_words(drafts: int) -> int:
    return TAG_WORDS + ceil_div(_most_forced(drafts), 2)


@cache
def checksum_weights(words: int) -> NDArray[np.int64]:
    """Return the weight of each word of a line: pseudorandom odd numbers, so that any change of one word is detected,
    and 0 for the checksum. [words] (SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014.)
    """
    mixed = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    weights: NDArray[np.int64] = (mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64)
    weights[CHECKSUM] = 0
    weights.setflags(write=False)
    return weights


def _are_of(
    lines: NDArray[np.int64], epochs: NDArray[np.int64] | int, positions: NDArray[np.int32] | int, run: int
) -> NDArray[np.bool_]:
    """Return which lines, [n, words], are valid and belong to these epochs and positions, after `run` drafts. [n]"""
    found: NDArray[np.bool_] = lines[:, CHECKSUM] == _checksums(lines)
    found &= lines[:, RUN] == run
    found &= lines[:, EPOCH] == epochs
    found &= lines[:, POSITION] == positions
    return found


def _checksums(lines: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the checksum of one or several lines: the weighted sum of their words modulo 2**64, with the bits of BASIS
    flipped. [..., words] (Lemire and Kaser, "Strongly universal string hashing is fast", 2014.)
    """
    found: NDArray[np.int64] = lines @ checksum_weights(lines.shape[-1]) ^ BASIS
    return found
