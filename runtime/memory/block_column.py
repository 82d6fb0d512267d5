"""Columns with a number for each KV block, and the cached blocks, which have no owner.

Cached blocks are in the order of allocation. Blocks that were released together are one group. The oldest group is
allocated first, and in a group the last block first: the deepest of a prefix, which is worth nothing without the
others. A block that is owned again leaves a gap in its group. A group is compacted, in one pass, when it has more gaps
than blocks, or when it is the oldest and some of it is allocated. So the groups' size stays proportional to the cached
blocks, and a call touches only the groups of the blocks that it names.

The cached prefix of the next request is watched: how much of it can still be found, without another lookup.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

# Distinct blocks, in the form that columns work on: a few in a list, which is read one by one, thousands in an array
# [n].
Blocks = list[int] | NDArray[np.intp]
_FEW: Final = 16  # up to so many blocks the interpreter is as fast as array operations

_GAPS: Final = 16  # gaps that a small group may have, which are not worth a pass


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


class CachedBlocks:
    """Blocks below `num_blocks`, each at most once."""

    def __init__(self, num_blocks: int) -> None:
        self._group_of = BlockColumn(num_blocks, np.int64)  # the number of a block's group; 0: not cached
        self._groups: OrderedDict[int, array[int]] = OrderedDict()  # by number, oldest first; with gaps
        self._sizes: dict[int, int] = {}  # of each group, without gaps
        self._newest = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        return self._group_of.one[block] != 0

    def __iter__(self) -> Iterator[int]:
        """Yield the blocks in the order of allocation."""
        group_of = self._group_of.one
        for number, group in self._groups.items():
            yield from (block for block in reversed(group) if group_of[block] == number)

    def count(self, blocks: Blocks) -> int:
        """Return how many of these distinct blocks are cached."""
        return len(self._group_of.having(blocks))

    def add(self, blocks: array[int]) -> None:
        """Add one or more int32 blocks, to be allocated after all others, the last of them first. The array is kept."""
        self._newest = number = self._newest + 1
        self._groups[number] = blocks
        self._sizes[number] = len(blocks)
        self._count += len(blocks)
        self._group_of.put(in_bulk(blocks), number)

    def remove(self, blocks: Blocks) -> None:
        """Remove one or more of the blocks."""
        if isinstance(blocks, list):
            for block in blocks:
                number = self._group_of.one[block]
                self._group_of.one[block] = 0
                self._leave(number, 1)
            return
        numbers = self._group_of.many[blocks]
        self._group_of.many[blocks] = 0
        first = int(numbers[0])
        if not np.count_nonzero(numbers != first):  # the common case is one group; `unique` would sort
            self._leave(first, numbers.size)
            return
        several, counts = np.unique(numbers, return_counts=True)
        for number, count in zip(several.tolist(), counts.tolist(), strict=True):
            self._leave(number, count)

    def pop(self, count: int) -> list[int]:
        """Remove and return `count` blocks in the order of allocation. So many must be there."""
        given_out: list[int] = []
        group_of = self._group_of.one
        while len(given_out) < count:
            number, group = next(iter(self._groups.items()))
            if self._sizes[number] != len(group):
                group = self._close_up(number)
            given = min(len(group), count - len(given_out))
            for _ in range(given):
                block = group.pop()
                group_of[block] = 0
                given_out.append(block)
            self._leave(number, given)
        return given_out

    def is_consistent(self) -> bool:
        """Return whether the groups, their sizes and the column agree."""
        numbers, counts = np.unique(self._group_of.many, return_counts=True)
        sizes = {number: count for number, count in zip(numbers.tolist(), counts.tolist(), strict=True) if number}
        return sizes == self._sizes and self._sizes.keys() == self._groups.keys() and sum(sizes.values()) == self._count

    def _leave(self, number: int, count: int) -> None:
        """Remove `count` blocks from a group."""
        self._count -= count
        left = self._sizes[number] - count
        if not left:
            del self._groups[number], self._sizes[number]
            return
        self._sizes[number] = left
        if len(self._groups[number]) > 2 * left + _GAPS:
            self._close_up(number)

    def _close_up(self, number: int) -> array[int]:
        blocks = np.asarray(self._groups[number], np.intp)
        self._groups[number] = group = int32_array(blocks[self._group_of.many[blocks] == number])
        return group


class Watched:
    """Findable blocks of one prefix, in order.

    The pool updates these figures with every block that changes hands, so that the blocks are not looked up again.

    blocks: the watched blocks. unowned: how many of them are cached: sharing them makes so many fewer available.
    findable: how many, from the first on, can still be found.

    indexes: for each block of the pool, its number among them, from 1 on, or 0. Only this object uses it until `close`.
    """

    def __init__(self, indexes: BlockColumn) -> None:
        self.blocks = array("i")
        self.unowned = 0
        self.findable = 0
        self._indexes = indexes

    def add(self, block: int, is_unowned: bool) -> None:
        """Append a block. All others are findable."""
        self.blocks.append(block)
        self._indexes.one[block] = len(self.blocks)
        self.unowned += is_unowned
        self.findable += 1

    def drop(self, is_unowned: bool) -> None:
        """Remove the last block."""
        self._indexes.one[self.blocks.pop()] = 0
        self.unowned -= is_unowned

    def close(self) -> None:
        """Stop watching these blocks."""
        self._indexes.put(in_bulk(self.blocks), 0)

    def count(self, blocks: Blocks) -> int:
        """Return how many of these blocks are watched."""
        return len(self._indexes.having(blocks))

    def forget(self, block: int, is_unowned: bool) -> None:
        """Record that a block can't be found any more."""
        index = self._indexes.one[block]
        if index:
            self.findable = min(self.findable, index - 1)
            self.unowned -= is_unowned
