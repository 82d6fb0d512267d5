"""The cached prefix of the request that is next: how much of it is still there, without another look."""

from __future__ import annotations

from array import array

from runahead.runtime.memory.block_column import BlockColumn, Blocks, in_bulk


class Watched:
    """Findable blocks of one prefix, in order.

    The pool keeps these figures right with every block that changes hands, so that nobody looks at all blocks again.

    blocks: those that are watched. unheld: of them, those that are available: sharing them leaves so many fewer to
    allocate. findable: of them, the first ones, up to the first that can't be found any more.

    places: of each block of the pool, its place among them, from 1 on, or 0. It is theirs until `close`.
    """

    def __init__(self, places: BlockColumn) -> None:
        self.blocks = array("i")
        self.unheld = 0
        self.findable = 0
        self._places = places

    def add(self, block: int, is_unheld: bool) -> None:
        """The next of its blocks. All others are findable."""
        self.blocks.append(block)
        self._places.one[block] = len(self.blocks)
        self.unheld += is_unheld
        self.findable += 1

    def drop(self, is_unheld: bool) -> None:
        """The last of its blocks is left out."""
        self._places.one[self.blocks.pop()] = 0
        self.unheld -= is_unheld

    def close(self) -> None:
        """These blocks are watched no more."""
        self._places.put(in_bulk(self.blocks), 0)

    def count(self, blocks: Blocks) -> int:
        """How many of these are among its blocks."""
        return len(self._places.having(blocks))

    def forget(self, block: int, is_unheld: bool) -> None:
        """It can't be found any more."""
        place = self._places.one[block]
        if place:
            self.findable = min(self.findable, place - 1)
            self.unheld -= is_unheld
