"""Cached blocks, which have no owner, in the order of allocation.

Blocks that were released together are one group. The oldest group is allocated first, and in a group the last block
first: the deepest of a prefix, which is worth nothing without the others. A block that is owned again leaves a gap in
its group. A group is compacted, in one pass, when it has more gaps than blocks, or when it is the oldest and some of it
is allocated. So the groups' size stays proportional to the cached blocks, and a call touches only the groups of the
blocks that it names.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import numpy as np

from runahead.runtime.memory.block_column import BlockColumn, Blocks, in_bulk, int32_array

_GAPS: Final = 16  # gaps that a small group may have, which are not worth a pass


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
