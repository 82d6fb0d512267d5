"""Finds what a request's tokens begin with: KV blocks by their keys, see `runahead.runtime.wire.prompts`, and
snapshots of recurrent states.

A request may bring its prompt's keys, so that they need not be hashed again for the lookup. They are not trusted: a
block is found only if its token ids and the preceding key are equal, and the salt is hashed here; and the key under
which a block becomes findable is hashed here.

Snapshots are a separate cache group beside the KV blocks. Behind cached blocks a row needs the recurrent state after
their tokens. A *snapshot* is the state of a row at a block boundary, at every `every`-th one. It is found by the
content of the block that ends there, and has a block's life: its pool is a `BlockPool` with snapshots in place of
blocks.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.wire.prompts import Content, PrefixKeys

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


class Hit(NamedTuple):
    """The cached prefix of a request's tokens.

    blocks: its blocks, int32, in order. unowned: how many of them are cached: sharing them makes so many fewer
    available. snapshot: the state behind them; NO_SNAPSHOT if nothing is found or the model has no states.
    """

    blocks: array[int]
    unowned: int
    snapshot: int = NO_SNAPSHOT


class PrefixWalk:
    """A lookup of the findable blocks that a request's tokens begin with, made in pieces, each block once.

    The block of the last token is excluded: the token's logits are needed, so it is always computed. The walk stays
    right while blocks come and go: the pool removes forgotten ones, and only the position where the walk ended is
    looked up again.

    snapshots: of a model with states; None: the model has none. tokens: int32 [n]. Only a pool's newest walk is right.
    """

    def __init__(
        self, pool: BlockPool, keys: PrefixKeys, tokens: NDArray[np.int32], snapshots: SnapshotPool | None = None
    ) -> None:
        self._pool = pool
        self._snapshots = snapshots
        self._boundaries: list[
            tuple[int, Content]
        ] = []  # boundaries with a snapshot: blocks before it, and its content
        self._keys = keys
        self._tokens = np.ascontiguousarray(tokens).data.cast("B")
        self._most = (tokens.size - 1) // pool.block_size
        self._watched = pool.watch()
        self.at_end = False  # the last lookup found no further block

    def advance(self, blocks: int) -> bool:
        """Look up at most `blocks` more blocks. Returns `at_end`."""
        self._pool.shorten()
        found, size = self._watched.blocks, 4 * self._pool.block_size
        for index in range(len(found), min(len(found) + blocks, self._most)):
            tokens = bytes(self._tokens[index * size : (index + 1) * size])
            content = self._keys.sought(index, tokens)
            if not self._pool.extend(content):
                self.at_end = True
                return True
            self._keys.found(index, content)
            snapshots = self._snapshots
            if snapshots is not None and snapshots.find(content) is not None:
                self._boundaries.append((index + 1, content))
        self.at_end = len(found) == self._most
        return self.at_end

    @property
    def hit(self) -> Hit:
        """The prefix found so far. For a model with states it ends at the last snapshot: later tokens are computed
        again, because keys and values do not give the state."""
        blocks = self._watched.blocks
        if self._snapshots is None:
            return Hit(blocks, self._watched.unowned)
        while self._boundaries:
            count, content = self._boundaries[-1]
            snapshot = self._snapshots.find(content)
            if snapshot is not None and count <= len(blocks):
                return Hit(blocks[:count], self._pool.unowned(blocks[:count]), snapshot)
            self._boundaries.pop()  # allocated since, or behind a block that was
        return Hit(blocks[:0], 0)
