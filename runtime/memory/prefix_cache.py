"""Finds the KV blocks that a request's tokens begin with, by their keys: see `runahead.runtime.wire.block_keys`.

Whoever asks may bring the keys of its prompt along, so that nobody hashes it again to look it up. They are believed in
nothing else: a block is found where its token ids and the key before it are those that are looked for, up to the salt,
which is hashed here; and the key that a block becomes findable under is hashed here.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.memory.snapshot_pool import NO_SNAPSHOT, SnapshotPool
from runahead.runtime.wire.block_keys import Content, PrefixKeys


class Hit(NamedTuple):
    """What of a request's tokens need not be computed again.

    blocks: those that it begins with, int32, in order. unheld: of these, the available ones: sharing them leaves so
    many fewer to allocate. snapshot: of the state behind them; NO_SNAPSHOT where nothing is found, or the model keeps
    no states.
    """

    blocks: array[int]
    unheld: int
    snapshot: int = NO_SNAPSHOT


class PrefixWalk:
    """The findable blocks that a request's tokens begin with, looked for in pieces, each once.

    They are never those that hold its last token: that token's logits are wanted, so that it is computed again whatever
    is cached. While blocks come and go the walk stays right: the pool takes away what is forgotten, and only the place
    where it ended is looked at again.

    snapshots: of a model that keeps states; None: it keeps none. tokens: int32 [n]. Only the newest walk of a pool is
    right.
    """

    def __init__(
        self, pool: BlockPool, keys: PrefixKeys, tokens: NDArray[np.int32], snapshots: SnapshotPool | None = None
    ) -> None:
        self._pool = pool
        self._snapshots = snapshots
        self._borders: list[tuple[int, Content]] = []  # where a snapshot was seen: blocks before it, and its content
        self._keys = keys
        self._tokens = np.ascontiguousarray(tokens).data.cast("B")
        self._most = (tokens.size - 1) // pool.block_size
        self._watched = pool.watch()
        self.at_end = False  # for now: no block was found behind those that were, at the last look

    def look(self, blocks: int) -> bool:
        """Look at so many blocks more, at most. Returns `at_end`."""
        self._pool.shorten()
        found, size = self._watched.blocks, 4 * self._pool.block_size
        for place in range(len(found), min(len(found) + blocks, self._most)):
            tokens = bytes(self._tokens[place * size : (place + 1) * size])
            content = self._keys.sought(place, tokens)
            if not self._pool.extend(content):
                self.at_end = True
                return True
            self._keys.found(place, content)
            snapshots = self._snapshots
            if snapshots is not None and snapshots.find(content) is not None:
                self._borders.append((place + 1, content))
        self.at_end = len(found) == self._most
        return self.at_end

    @property
    def hit(self) -> Hit:
        """What was found by now. Of a model with states the blocks up to the last snapshot alone: what lies behind it
        is computed again, since a state can't be made of keys and values."""
        blocks = self._watched.blocks
        if self._snapshots is None:
            return Hit(blocks, self._watched.unheld)
        while self._borders:
            count, content = self._borders[-1]
            snapshot = self._snapshots.find(content)
            if snapshot is not None and count <= len(blocks):
                return Hit(blocks[:count], self._pool.unheld(blocks[:count]), snapshot)
            self._borders.pop()  # given out since, or behind a block that was
        return Hit(blocks[:0], 0)
