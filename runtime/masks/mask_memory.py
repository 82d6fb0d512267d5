"""Where the masks of each row's next positions lie: memory that the mask worker writes and S and the drafter read.

Each row slot has a line for the mask of the row's next position, and one for each position behind it, as far as drafts
may reach. A line is a tag and the mask behind it. The tag says which mask it is (the row's epoch, the row's next
position, how many drafts lie between that and the mask's own, and which) and what it is the tag of (a checksum over
itself and the mask). A reader copies a line once, and judges by that copy alone: what changes in the memory afterwards
changes no verdict. A copy made while the line was being written has a checksum that does not fit, whatever order the
stores of another processor become seen in. It is a sum that each reader can make, a GPU too, in whatever order.

Beside its masks a slot has the tokens that the grammar forces from the row's next position on, with a tag of the same
kind. Nothing hangs on these: they are proposed, and verified under masks like any other drafts.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.rounding import ceil_div
from runahead.runtime.token_mask import mask_words

# Words of 64 bits at the beginning of a line.
EPOCH: Final = 0
POSITION: Final = 1
RUN: Final = 2  # drafts between that position and the mask's
CHECKSUM: Final = 3
TAG_WORDS: Final = 4
# Behind these come the drafts, and then the mask: of a line of forced tokens, nothing but these, and `RUN` of them.

# Words of 64 bits at the beginning of the memory: what the worker has done so far. It alone writes them.
HANDLED: Final = 0  # orders
MASKS: Final = 1  # written
MASK_NS: Final = 2  # that these took
COMPILED: Final = 3  # grammars
COMPILE_NS: Final = 4  # that these took
FOUND: Final = 5  # grammars that had been compiled before
ASKED: Final = 6  # grammars that it has begun to compile, or will
_FIGURES: Final = 8

NO_RUN: Final = np.zeros(0, np.int32)
BASIS: Final = 0x2545F491  # the checksum of a line of zeros, so that memory which nobody has written is no line


class MaskMemory:
    """max_rows: row slots. drafts: the most of a run. memory: a file's descriptor, of `MaskMemory.size(...)` bytes,
    which processes share; None is for one process alone."""

    def __init__(self, max_rows: int, vocab_size: int, drafts: int = 0, memory: int | None = None) -> None:
        size = self.size(max_rows, vocab_size, drafts)
        # The map keeps its file; with -1 it has none.
        self.words = words = np.frombuffer(mmap.mmap(-1 if memory is None else memory, size), np.int64)
        forced, end = _FIGURES, _FIGURES + max_rows * _forced_words(drafts)
        self.drafts = drafts
        self.most_forced = _most_forced(drafts)
        self.figures: NDArray[np.int64] = words[:_FIGURES]
        self.forced = words[forced:end].reshape(max_rows, -1)
        self.lines = words[end:].reshape(max_rows, 1 + drafts, -1)
        self._mask_words = mask_words(vocab_size)
        self.mask_at = TAG_WORDS + ceil_div(drafts, 2)  # of a line's words, where its mask begins

    @staticmethod
    def size(max_rows: int, vocab_size: int, drafts: int = 0) -> int:
        """Bytes of the lines of so many row slots."""
        line = TAG_WORDS + ceil_div(drafts, 2) + ceil_div(mask_words(vocab_size), 2)
        return 8 * (_FIGURES + max_rows * (_forced_words(drafts) + (1 + drafts) * line))

    def write_behind(
        self, slot: int, epoch: int, position: int, mask: NDArray[np.int32], run: NDArray[np.int32]
    ) -> None:
        """The tokens that may come behind these drafts, [1 to `drafts`], of the row that has had the slot since this
        epoch, and whose next position is this one. mask: as `runahead.runtime.token_mask` lays it out,
        [mask_words(vocab)]"""
        line = np.zeros(self.lines.shape[2], np.int64)
        line[EPOCH], line[POSITION], line[RUN] = epoch, position, run.size
        line[TAG_WORDS : self.mask_at].view(np.int32)[: run.size] = run
        line[self.mask_at :].view(np.int32)[: mask.size] = mask
        line[CHECKSUM] = _checksums(line)
        self.lines[slot, run.size] = line

    def write_next(self, tags: NDArray[np.int64], masks: NDArray[np.int32]) -> None:
        """The tokens that may come next, of several rows. tags: slot, epoch and position of each, as `write_behind` has
        them. [n, 3], [n, mask_words(vocab)]"""
        lines = np.zeros((len(tags), self.lines.shape[2]), np.int64)
        lines[:, EPOCH], lines[:, POSITION] = tags[:, 1], tags[:, 2]
        lines[:, self.mask_at :].view(np.int32)[:, : masks.shape[1]] = masks
        lines[:, CHECKSUM] = _checksums(lines)
        self.lines[tags[:, 0], 0] = lines

    def read_behind(self, slot: int, epoch: int, position: int, run: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """That mask, a copy; None while it is not there, or if it is that behind other drafts. [mask_words(vocab)]"""
        line = self.lines[slot, run.size].copy()  # the only look at what another process writes
        if not _are_of(line[None], epoch, position, run.size):
            return None
        if not np.array_equal(line[TAG_WORDS : self.mask_at].view(np.int32)[: run.size], run):
            return None
        mask: NDArray[np.int32] = line[self.mask_at :].view(np.int32)[: self._mask_words]
        return mask

    def read_next(
        self, slots: NDArray[np.int64], epochs: NDArray[np.int64], positions: NDArray[np.int32]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
        """Those of the next positions of several rows: which are there, and copies of them, or nonsense. [n], [n], [n];
        returns [n], [n, mask_words(vocab)]"""
        lines = self.lines[slots, 0]  # the only look at what another process writes
        return _are_of(lines, epochs, positions, 0), lines[:, self.mask_at :].view(np.int32)[:, : self._mask_words]

    def write_forced(self, slot: int, epoch: int, position: int, tokens: Sequence[int]) -> None:
        """What must come from this position of the row on, [at most `most_forced`]; none: nothing is known."""
        line = np.zeros(self.forced.shape[1], np.int64)
        line[EPOCH], line[POSITION], line[RUN] = epoch, position, len(tokens)
        line[TAG_WORDS:].view(np.int32)[: len(tokens)] = tokens
        line[CHECKSUM] = _checksums(line)
        self.forced[slot] = line

    def read_forced(self, slot: int, epoch: int, position: int, newest: int, count: int) -> NDArray[np.int32]:
        """Up to `count` tokens that must come from this position of the row on, if it went on as its grammar forces it.
        newest: its token before that. [n]"""
        line = self.forced[slot].copy()  # the only look
        ahead, known = position - int(line[POSITION]), int(line[RUN])
        if line[EPOCH] != epoch or not 0 <= ahead < known or line[CHECKSUM] != _checksums(line):
            return NO_RUN
        return tokens_behind(line[TAG_WORDS:].view(np.int32)[:known], ahead, newest)[:count]


def tokens_behind(forced: NDArray[np.int32], ahead: int, newest: int) -> NDArray[np.int32]:
    """What of the forced tokens, [n], is left where the row has gone on by `ahead` tokens, the last of them `newest`.
    The mask worker and the drafter ask the same question."""
    if ahead < 0 or (0 < ahead <= forced.size and forced[ahead - 1] != newest):
        return NO_RUN
    return forced[ahead:]


def _most_forced(drafts: int) -> int:
    """The token that S samples where they are first known, those that the launch after it verifies, and one more."""
    return 2 * drafts + 2 if drafts else 0


def _forced_words(drafts: int) -> int:
    return TAG_WORDS + ceil_div(_most_forced(drafts), 2)


@cache
def checksum_weights(words: int) -> NDArray[np.int64]:
    """What each word of a line is multiplied by: odd numbers that look random, so that no word can change alone, and 0
    for the checksum itself. [words] (The numbers are those of SplitMix64: Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", 2014.)"""
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
    """Which lines, [n, words], are whole, and of rows of these epochs at these positions, behind so many drafts. [n]"""
    found: NDArray[np.bool_] = lines[:, CHECKSUM] == _checksums(lines)
    found &= lines[:, RUN] == run
    found &= lines[:, EPOCH] == epochs
    found &= lines[:, POSITION] == positions
    return found


def _checksums(lines: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of everything in a line, or in each of several, but the checksum: the sum of its words, each times its weight,
    modulo 2**64, with the bits of BASIS flipped. [..., words] (Lemire and Kaser, "Strongly universal string hashing is
    fast", 2014.)"""
    found: NDArray[np.int64] = lines @ checksum_weights(lines.shape[-1]) ^ BASIS
    return found
