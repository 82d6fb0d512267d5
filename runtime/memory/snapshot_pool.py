"""Snapshots of recurrent states, a separate cache group beside the KV blocks.

Behind cached blocks a row needs the recurrent state after their tokens. A *snapshot* is the state of a row at a block
boundary, at every `every`-th one. It is found by the content of the block that ends there, and has a block's life: this
pool is a `runahead.runtime.memory.block_pool.BlockPool` with snapshots in place of blocks.
"""

from __future__ import annotations

from typing import Final

from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.wire.block_keys import Content

NO_SNAPSHOT: Final = 0


class SnapshotPool(BlockPool):
    """Snapshots 1 to count; none if count is 0. every: blocks between two boundaries with a snapshot."""

    group = 1

    def __init__(self, count: int, every: int, block_size: int) -> None:
        super().__init__(1 + max(1, count), block_size)
        self.every = every if count else 0
        self.kept_total = 0  # snapshots that became findable
        self.found_total = 0  # rows that began with a snapshot
        self.skipped_total = 0  # reachable boundaries without a snapshot: none was available, or the plan had no room
        if not count:
            self.total = 0
            self._free.clear()

    def ends_at_boundary(self, index: int) -> bool:
        """Return whether the state behind the row's block `index` is kept."""
        return bool(self.every) and (index + 1) % self.every == 0

    def make_findable(self, block: int, content: Content) -> bool:
        """See `BlockPool.make_findable`."""
        is_new = super().make_findable(block, content)
        self.kept_total += is_new
        return is_new

    def begin_with(self, snapshot: int) -> None:
        """Begin a row's state as this findable snapshot. Only the launch that begins the row names it."""
        self.share([snapshot])
        self.fence([snapshot])
        self.found_total += 1
