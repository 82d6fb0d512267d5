"""A number for each KV block, read and written for one block, for a few or for thousands."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

# Different blocks, in the form that columns work on: a few in a list, each looked at for itself, thousands in an array
# [n].
Blocks = list[int] | NDArray[np.intp]
_FEW: Final = 16  # blocks, at most, for which the interpreter is as quick as passes over an array


def in_bulk(blocks: Sequence[int]) -> Blocks:
    """Different blocks, in the form that columns work on."""
    return list(blocks) if len(blocks) <= _FEW else np.asarray(blocks, np.intp)


class BlockPoolError(RuntimeError):
    """A block changed hands in a way it must not: a mistake of ours, never a user's."""


def raise_for(blocks: Blocks, sentence: str) -> None:
    """Raises BlockPoolError about the first of these blocks, if there is one."""
    if len(blocks):
        raise BlockPoolError(f"block {blocks[0]} {sentence}")


def int32_array(blocks: Blocks) -> array[int]:
    """Blocks as requests hold them: compact, copied as a whole, and easily made longer."""
    return array("i", blocks if isinstance(blocks, list) else blocks.astype(np.intc).tobytes())


class BlockColumn:
    """Numbers of the blocks below `num_blocks`, zeros at first.

    many: [num_blocks], to index by an array of blocks. one: the same memory, to index by one block, which is twice as
    quick.
    """

    __slots__ = ("many", "one")

    def __init__(self, num_blocks: int, dtype: DTypeLike = np.int32) -> None:
        self.many: NDArray[Any] = np.zeros(num_blocks, dtype)
        self.one = self.many.data

    def without(self, blocks: Blocks) -> Blocks:
        """Those of these blocks whose number is 0, in order."""
        if not isinstance(blocks, list):
            is_zero: NDArray[np.bool_] = self.many[blocks] == 0
            return blocks[is_zero]
        one, found = self.one, []  # no comprehension: it would take twice as long for one block
        for block in blocks:
            if not one[block]:
                found.append(block)
        return found

    def having(self, blocks: Blocks) -> Blocks:
        """Those of these blocks whose number is not 0, in order."""
        if not isinstance(blocks, list):
            is_other: NDArray[np.bool_] = self.many[blocks] != 0
            return blocks[is_other]
        one, found = self.one, []
        for block in blocks:
            if one[block]:
                found.append(block)
        return found

    def put(self, blocks: Blocks, number: int) -> None:
        """Each of these blocks has this number from now on."""
        if isinstance(blocks, list):
            one = self.one
            for block in blocks:
                one[block] = number
        else:
            self.many[blocks] = number

    def count_up(self, blocks: Blocks) -> Blocks:
        """One more for each of these blocks. Returns those that had 0."""
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
        """One less for each of these blocks. Returns those that have 0 now.

        Raises BlockPoolError where a block has 0 before. else_said: what it then says of the block.
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
