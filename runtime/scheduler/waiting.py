"""The queue: who waits for a row, by rank, and who may have one now.

However many wait, finding the first of them, adding one and taking one away is a search in an ordered list: nobody
looks at all of them. What is known of the first one's cached prefix is kept from launch to launch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from operator import attrgetter
from typing import Final

import numpy as np

from runahead.runtime.memory.prefix_cache import Hit, PrefixWalk
from runahead.runtime.rounding import ceil_div
from runahead.runtime.scheduler.holdings import Holdings
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import RowPhase

_PREFILL: Final = int(RowPhase.PREFILL)
_DECODE: Final = int(RowPhase.DECODE)
_rank: Final = attrgetter("rank")
_LOOKED_AT: Final = 36  # blocks of a prefix that one look adds, in some 75 microseconds; mostly a turn has two


class WaitingQueue:
    """Requests without a row: higher priority first, then first come first served.

    Those that need a penalty slot wait in a line of their own, so that they can be passed while there is none.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._plain: list[Request] = []
        self._penalised: list[Request] = []
        self._holdings = holdings
        self._looked_for: Request | None = None  # whose prefix the walk is about
        self._walk: PrefixWalk | None = None
        self._running: tuple[int, int] = (0, 0)  # see `_needed_by_rows`
        self._running_at = (-1, -1)

    def __len__(self) -> int:
        return len(self._plain) + len(self._penalised)

    def __iter__(self) -> Iterator[Request]:
        return merge(self._plain, self._penalised, key=_rank)

    def add(self, request: Request) -> None:
        line = self._line_of(request)
        if not line or line[-1].rank < request.rank:
            line.append(request)  # as nearly everybody
        else:
            insort(line, request, key=_rank)

    def remove(self, request: Request) -> None:
        """It is admitted, or has ended. Raises ValueError if it does not wait."""
        line = self._line_of(request)
        place = bisect_left(line, request.rank, key=_rank)
        if place == len(line) or line[place] is not request:
            raise ValueError("the request does not wait")
        del line[place]
        if request is self._looked_for:
            self._looked_for, self._walk = None, None

    def first(self) -> Request | None:
        """Whose turn it is, of those who lack no penalty slot."""
        line, other = self._plain, self._penalised
        if other and self._holdings.penalty_slots.free and (not line or other[0].rank < line[0].rank):
            line = other
        return line[0] if line else None

    def next_admission(self) -> tuple[Request, Hit] | None:
        """The first in the queue, and the cached prefix that it begins with; None if it must wait.

        Nobody is admitted while a row waits for blocks. A request that waits for a penalty slot lets others pass. A
        long prefix is looked up in pieces: until all of it is, None, and `look_further`.
        """
        found, pool = self._next_with_room(), self._holdings.pool
        if found is None:
            return None
        request, needed = found
        if self._walk is None or request is not self._looked_for:
            self._looked_for, self._walk = request, self._holdings.walk(request)
        if not self._walk.look(_LOOKED_AT):
            return None
        hit = self._walk.hit
        return None if needed - len(hit.blocks) > pool.available - hit.unheld else (request, hit)

    def look_further(self) -> bool:
        """Go on with the prefix that is not looked up to its end, if it keeps somebody waiting. False: none does."""
        if self._walk is None or self._walk.at_end or self._next_with_room() is None:
            return False
        self.next_admission()
        return True

    def _next_with_room(self) -> tuple[Request, int] | None:
        """The first in the queue and the blocks it needs; None if it must wait, whatever is found of its prefix."""
        held, pool = self._holdings, self._holdings.pool
        if not len(self) or not held.rows.free or held.paused:
            return None
        request = self.first()
        if request is None:
            return None
        needed = self._blocks_needed(request)
        if needed > pool.available + pool.findable - pool.cached:
            return None  # even if every findable block that others hold were in its prefix
        return request, needed

    def tokens_at_most(self, limits: SchedulerLimits, enough: int) -> int:
        """Prompt tokens of the first chunks of all who could be admitted with one launch, at most.

        enough: so many are as good as more.
        """
        found, held, pool = self.next_admission(), self._holdings, self._holdings.pool
        if found is None:
            return 0
        request, hit = found
        start = len(hit.blocks) * pool.block_size
        tokens = min(limits.cut(start), request.tokens.size) - start
        left = pool.available - pool.blocks_for(request.tokens.size) + len(hit.blocks)
        for other in self._next(min(held.rows.free, limits.admissions))[1:]:
            left -= max(1, pool.blocks_for(other.tokens.size) - pool.findable)  # as if all of these were in its prefix
            if left < 0 or tokens >= enough:
                break
            tokens += min(limits.cut(0), other.tokens.size)
        return tokens

    def _next(self, count: int) -> list[Request]:
        """The first ones, of those who lack no penalty slot."""
        penalised = self._penalised[: min(count, self._holdings.penalty_slots.free)]
        return sorted([*self._plain[:count], *penalised], key=_rank)[:count]

    def _line_of(self, request: Request) -> list[Request]:
        return self._penalised if request.sampling.has_penalty else self._plain

    def _blocks_needed(self, request: Request) -> int:
        """Blocks that must be there, or shared, before a request gets a row, so that rows are not evicted soon after.

        All that is known of it, and what running rows still need for what is known of them, or a block to go on. The
        more often it was evicted, the more of what it may become. A protected request needs room for itself and for all
        running rows at their longest.
        """
        soon, at_most = self._needed_by_rows()
        most = self._holdings.blocks_at_most(request)
        if request.is_protected:
            return most + at_most
        own = self._holdings.pool.blocks_for(request.tokens.size) + (1 << request.evictions) - 1
        return min(most, own) + soon

    def _needed_by_rows(self) -> tuple[int, int]:
        """Blocks that running rows still need: soon, and at most. They are counted again once a row has begun, ended or
        changed its phase, or somebody got a block."""
        rows, pool = self._holdings.rows, self._holdings.pool
        now = rows.changes, pool.allocated_total
        if now != self._running_at:
            running = ((rows.phase == _PREFILL) | (rows.phase == _DECODE)).nonzero()[0]
            have, size = rows.num_blocks[running], pool.block_size
            may_need = ceil_div(rows.max_len[running] - 1, size) - have  # the last token is never forwarded
            soon = np.maximum(1, ceil_div(rows.known_len[running], size) - have)
            self._running = sum(np.minimum(may_need, soon).tolist()), sum(may_need.tolist())
            self._running_at = now
        return self._running
