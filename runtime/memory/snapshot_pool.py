"""Places for snapshots of recurrent states, a cache group of its own beside the KV blocks.

Behind cached blocks a row needs the state that their tokens have left. A *snapshot* is the state of a row at a border
between two blocks, at every `every`-th one. It is found by the content of the block that ends there, and has the life
of a block: see `runahead.runtime.memory.block_pool.BlockPool`, of which this is one, with snapshots in place of blocks.
"""

from __future__ import annotations

from typing import Final

from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.wire.block_keys import Content

NO_SNAPSHOT: Final = 0


class SnapshotPool(BlockPool):
    """Snapshots 1 to count; none if count is 0. every: blocks from one border with a snapshot to the next."""

    group = 1

    def __init__(self, count: int, every: int, block_size: int) -> None:
        super().__init__(1 + max(1, count), block_size)
        self.every = every if count else 0
        self.kept_total = 0  # those that became findable
        self.found_total = 0  # times that a row began with one
        self.skipped_total = 0  # borders that a row may reach and that got none: there was none, or no room in a plan
        if not count:
            self.total = 0
            self._free.clear()

    def ends_at_border(self, place: int) -> bool:
        """The state behind the block at this place of a row is kept."""
        return bool(self.every) and (place + 1) % self.every == 0

    def make_findable(self, block: int, content: Content) -> bool:
        """See `BlockPool.make_findable`."""
        is_new = super().make_findable(block, content)
        self.kept_total += is_new
        return is_new

    def begin_with(self, snapshot: int) -> None:
        """A row's state begins as this one, which is findable: only the launch that begins the row names it."""
        self.share([snapshot])
        self.fence([snapshot])
        self.found_total += 1
