"""The cached prefix of the next request: how much of it can still be found, without another lookup."""

from __future__ import annotations

from array import array

from runahead.runtime.memory.block_column import BlockColumn, Blocks, in_bulk


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
