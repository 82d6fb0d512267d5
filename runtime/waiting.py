"""The queue: who waits for a row, by rank, and who may have one now. Pure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

import numpy as np

from runtime.holdings import Holdings
from runtime.lifecycle import Request
from runtime.rows import RowPhase


class WaitingQueue:
    """Requests without a row, by rank."""

    def __init__(self, holdings: Holdings) -> None:
        self._requests: list[Request] = []
        self._holdings = holdings

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=lambda waiting: waiting.rank)

    def remove(self, request: Request) -> None:
        """It is admitted, or has ended. Raises ValueError if it does not wait."""
        self._requests.remove(request)

    def next_admission(self) -> tuple[Request, list[int]] | None:
        """The first in the queue, and the cached blocks that it begins with; None if it must wait.

        Nobody is admitted while a row waits for blocks. A request that waits for a penalty slot lets others pass.
        """
        held = self._holdings
        if not self._requests or not held.rows.free or held.paused:
            return None
        ready = (one for one in self._requests if held.penalty_slots.free or not one.sampling.has_penalty)
        request = next(ready, None)
        if request is None:
            return None
        needed, pool = self._blocks_needed(request), held.pool
        if needed > pool.available + pool.findable - pool.cached:
            return None  # even if all that others hold and can be found were its prefix
        prefix = held.prefix_of(request)
        if needed - len(prefix) > pool.available - pool.unheld(prefix):
            return None
        return request, prefix

    def _blocks_needed(self, request: Request) -> int:
        """Blocks that must be there, or shared, before a request gets a row, so that rows are not evicted soon after.

        All that is known of it, and what running rows still need for what is known of them, or a block to go on. The
        more often it was evicted, the more of what it may become; in the end everything that everybody may become.
        """
        rows, size = self._holdings.rows, self._holdings.pool.block_size
        most = self._holdings.blocks_at_most(request)
        running = ((rows.phase == RowPhase.PREFILL) | (rows.phase == RowPhase.DECODE)).nonzero()[0]
        have = rows.num_blocks[running]
        may_need = -(-(rows.max_len[running] - 1) // size) - have
        if request.is_protected:
            return most + int(may_need.sum())
        soon = np.maximum(1, -(-rows.known_len[running] // size) - have)
        own = self._holdings.pool.blocks_for(request.tokens.size) + (1 << request.evictions) - 1
        return min(most, own) + int(np.minimum(may_need, soon).sum())
