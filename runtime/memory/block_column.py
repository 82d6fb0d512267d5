"""A number for each KV block, accessed for one block, for a few or for thousands."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

# Distinct blocks, in the form that columns work on: a few in a list, which is read one by one, thousands in an array
# [n].
Blocks = list[int] | NDArray[np.intp]
_FEW: Final = 16  # up to so many blocks the interpreter is as fast as array operations


def in_bulk(blocks: Sequence[int]) -> Blocks:
    """Return distinct blocks in the form that columns work on."""
    return list(blocks) if len(blocks) <= _FEW else np.asarray(blocks, np.intp)


class BlockPoolError(RuntimeError):
    """A block changed hands in an invalid way, which is a bug, never a user's mistake."""


def raise_for(blocks: Blocks, sentence: str) -> None:
    """Raise BlockPoolError for the first of these blocks, if there is one."""
    if len(blocks):
        raise BlockPoolError(f"block {blocks[0]} {sentence}")


def int32_array(blocks: Blocks) -> array[int]:
    """Return blocks in the form that requests keep: compact, quickly copied and extended."""
    return array("i", blocks if isinstance(blocks, list) else blocks.astype(np.intc).tobytes())


class BlockColumn:
    """A number for each block below `num_blocks`, at first 0.

    many: [num_blocks], indexed by an array of blocks. one: the same memory, indexed by one block, which is twice as
    fast.
    """

    __slots__ = ("many", "one")

    def __init__(self, num_blocks: int, dtype: DTypeLike = np.int32) -> None:
        self.many: NDArray[Any] = np.zeros(num_blocks, dtype)
        self.one = self.many.data

    def without(self, blocks: Blocks) -> Blocks:
        """Return the blocks whose number is 0, in order."""
        if not isinstance(blocks, list):
            is_zero: NDArray[np.bool_] = self.many[blocks] == 0
            return blocks[is_zero]
        one, found = self.one, []  # not a comprehension, which takes twice as long for one block
        for block in blocks:
            if not one[block]:
                found.append(block)
        return found

    def having(self, blocks: Blocks) -> Blocks:
        """Return the blocks whose number is not 0, in order."""
        if not isinstance(blocks, list):
            is_other: NDArray[np.bool_] = self.many[blocks] != 0
            return blocks[is_other]
        one, found = self.one, []
        for block in blocks:
            if one[block]:
                found.append(block)
        return found

    def put(self, blocks: Blocks, number: int) -> None:
        """Set the number of each of these blocks."""
        if isinstance(blocks, list):
            one = self.one
            for block in blocks:
                one[block] = number
        else:
            self.many[blocks] = number

    def count_up(self, blocks: Blocks) -> Blocks:
        """Add one to each of these blocks. Returns the blocks that had 0."""
        if not isinstance(blocks, list):
            zeros = self.without(blocks)
            self.many[blocks] += 1
            return zeros
        one, first = self.one, []
        for block in blocks:
            number = one[block]
            one[block] = number + 1
            if not number:
                first.append(block)
        return first

    def count_down(self, blocks: Blocks, else_said: str) -> Blocks:
        """Subtract one from each of these blocks. Returns the blocks that have 0 now.

        Raises BlockPoolError if a block had 0. else_said: the message's text about that block.
        """
        if not isinstance(blocks, list):
            raise_for(self.without(blocks), else_said)
            self.many[blocks] -= 1
            return self.without(blocks)
        one, last = self.one, []
        for block in blocks:
            number = one[block] - 1
            if number < 0:
                raise_for([block], else_said)
            one[block] = number
            if not number:
                last.append(block)
        return last
