"""A model that a mistake cannot hide from: each token is a hash of every token before it, found by walking the row's
block table as the device's own state holds it when the work runs. A wrong table, a block reused too early or a stale
plan changes the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cuda_graphs.rings import RingMemory
from cuda_graphs.shape import LaunchShape
from runtime.host_rows import HostRows

_POISON = -(1 << 20)


class HashProgram:
    """KV blocks [num_blocks, block_size] hold token ids; the logits of a row are one number."""

    def __init__(
        self,
        rings: RingMemory,
        *,
        max_rows: int,
        num_blocks: int,
        block_size: int,
        context_length: int,
        vocab_size: int,
    ) -> None:
        self.rows = HostRows(rings, max_rows, -(-context_length // block_size), vocab_size, block_size, 32, 1024)
        self.cache = np.full((num_blocks, block_size), _POISON, np.int64)
        self._hashes = np.zeros(max_rows + 1, np.uint64)

    def sample(self, shape: LaunchShape) -> None:
        self.rows.begin()
        if not shape.sample_rows:
            return
        places, slots = self.rows.to_sample()
        seeds = self.rows.seed[slots].view(np.uint64)
        tokens = ((self._hashes[slots] ^ seeds) % np.uint64(self.rows.vocab_size)).astype(np.int32)
        early = self.rows.seq_len[slots] < self.rows.min_position[slots]
        for i in np.flatnonzero(early).tolist():
            while tokens[i] in self.rows.stop_ids[slots[i]]:
                tokens[i] = (tokens[i] + 1) % self.rows.vocab_size
        self.rows.publish(places, slots, tokens, np.ones(slots.size, np.bool_))

    def apply(self, shape: LaunchShape) -> int:
        return self.rows.apply()

    def forward(self, shape: LaunchShape) -> None:
        if self.rows.rows.size == 0:
            return
        queries = self.rows.queries()
        self.cache.reshape(-1)[queries.slot_mapping] = queries.token_ids
        for slot in queries.sample_slots.tolist():
            self._hashes[slot] = self._hash(slot)

    def _hash(self, slot: int) -> np.uint64:
        length = int(self.rows.seq_len[slot]) if self.rows.alive[slot] else 0
        size = self.rows.block_size
        blocks = self.rows.block_table[slot, : -(-length // size)]
        tokens = self.cache[blocks].reshape(-1)[:length].astype(np.uint64)
        weights = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (tokens + np.uint64(1)) * (weights | np.uint64(1))
        total = np.bitwise_xor.reduce(mixed ^ (mixed >> np.uint64(29))) if length else np.uint64(0)
        return np.uint64(total ^ (total >> np.uint64(32)))

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        names = ("last_token", "seq_len", "alive", "block_table", "min_position", "max_position", "stop_ids")
        return {name: getattr(self.rows, name).copy() for name in names}

    def poison_blocks(self, blocks: tuple[int, ...]) -> None:
        """Nonsense into KV blocks that nobody may read any more."""
        self.cache[list(blocks)] = _POISON

    def poison_slot(self, slot: int) -> None:
        """Nonsense into a row slot that nobody may name any more."""
        self.rows.last_token[slot] = _POISON
        self.rows.block_table[slot] = 1
        self.rows.alive[slot] = False
        self._hashes[slot] = 0xDEAD


class NullProgram:
    """Publishes the same token for every row and computes nothing: what is left is the engine's own time."""

    def __init__(self, rings: RingMemory, *, max_rows: int, token: int) -> None:
        self._rings = rings
        self._token = token
        self._number = 0
        self._cells = np.full(max_rows, token, np.int64)

    def sample(self, shape: LaunchShape) -> None:
        self._number += 1
        cells = self._rings.cells[self._rings.slot(self._number), : shape.sample_rows, 0]
        np.bitwise_or(self._cells[: shape.sample_rows], self._number << 32, out=cells)

    def apply(self, shape: LaunchShape) -> int:
        return 0

    def forward(self, shape: LaunchShape) -> None:
        pass

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        return {}
