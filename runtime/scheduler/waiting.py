"""The waiting queue: requests without a row, in queue order, and which of them may be admitted now.

Finding the first request, adding one and removing one are searches in an ordered list, whatever the queue's length. The
lookup of the first request's cached prefix continues from launch to launch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace, merge
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.memory.prefix_cache import Hit, PrefixWalk
from runahead.runtime.rounding import ceil_div
from runahead.runtime.scheduler.holdings import Holdings
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.rationing import ServiceKey, order_of_service
from runahead.runtime.scheduler.request import Request, SharedPrompt
from runahead.runtime.scheduler.rows import RowPhase
from runahead.runtime.wire.parameters import WaitReason

_PREFILL: Final = int(RowPhase.PREFILL)
_DECODE: Final = int(RowPhase.DECODE)
_queue_order: Final = attrgetter("queue_order")
_SEARCHED_BLOCKS: Final = 36  # blocks of a prefix that a call looks up, in about 75 µs; a turn usually has two calls


def _service_key(request: Request, has_row: bool, served: int) -> ServiceKey:
    """Return the sort key of a caller's first request."""
    return -request.precedence, has_row, served, request.order


@dataclass(slots=True)
class _CallerQueue:
    """Requests of one caller in queue order.

    penalised: requests that need a penalty slot. Others pass them while no penalty slot is free.
    """

    plain: list[Request] = field(default_factory=list)
    penalised: list[Request] = field(default_factory=list)

    def of(self, request: Request) -> list[Request]:
        return self.penalised if request.sampling.has_penalty else self.plain

    def in_order(self, penalised: bool = True) -> Iterator[Request]:
        """Yield the requests in queue order. penalised: include requests that need a penalty slot."""
        return merge(self.plain, self.penalised, key=_queue_order) if penalised else iter(self.plain)


class WaitingQueue:
    """Requests without a row, in the order of service.

    Higher precedence comes first. Then callers take turns: callers without a row, then the caller that was served the
    fewest tokens. A caller's requests are ordered by priority, then first come, first served.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._queues: dict[str, _CallerQueue] = {}  # of callers with a waiting request
        self._count = 0
        self._holdings = holdings
        self._searched_for: Request | None = None  # the request whose prefix `_walk` looks up
        self._walk: PrefixWalk | None = None
        self._running: tuple[int, int] = (0, 0)  # see `_needed_by_rows`
        self._running_at = (-1, -1)
        self._first: Request | None = None  # see `first`
        self._first_at = (-1, -1, False)
        self._changes = 0  # grows with each request that comes or goes
        self._without_row: dict[str, float] = {}  # when each waiting caller began to lack a row, oldest first
        self._rows_then: Mapping[str, int] = {}  # rows of each caller at the last update
        self._changed_callers = set[str]()  # callers whose queue began or ended since then
        # Counted, but in no queue: see `SharedPrompt.is_awaited_by`.
        self._by_prompt = dict[SharedPrompt, dict[Request, None]]()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        return self._by_service_key()

    @property
    def for_prompts(self) -> int:
        """Number of requests that wait until another completion has computed the blocks of their prompt."""
        return sum(map(len, self._by_prompt.values()))

    def add(self, request: Request) -> None:
        self._count += 1
        prompt = request.shared_prompt
        if prompt is not None and prompt.is_awaited_by(request):
            self._by_prompt.setdefault(prompt, {})[request] = None
        else:
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        if request.caller not in self._queues:
            self._queues[request.caller] = _CallerQueue()
            self._changed_callers.add(request.caller)
        queue = self._queues[request.caller].of(request)
        if not queue or queue[-1].queue_order < request.queue_order:
            queue.append(request)  # the common case
        else:
            insort(queue, request, key=_queue_order)
        self._changes += 1

    def _enqueue_ready(self) -> None:
        """Enqueue the requests whose shared prompt can be found by now."""
        for prompt in self._holdings.shared.take_ready():
            for request in self._by_prompt.pop(prompt, ()):
                self._enqueue(request)

    def remove(self, request: Request) -> None:
        """Remove a request that is admitted or has ended. Raises ValueError if it is not in the queue."""
        prompt = request.shared_prompt
        if prompt is not None and request in self._by_prompt.get(prompt, ()):
            del self._by_prompt[prompt][request]
            if not self._by_prompt[prompt]:
                del self._by_prompt[prompt]
            self._count -= 1
            return
        own = self._queues.get(request.caller, _CallerQueue())
        queue = own.of(request)
        index = bisect_left(queue, request.queue_order, key=_queue_order)
        if index == len(queue) or queue[index] is not request:
            raise ValueError("the request does not wait")
        del queue[index]
        if not own.plain and not own.penalised:
            del self._queues[request.caller]
            self._changed_callers.add(request.caller)
        self._count -= 1
        self._changes += 1
        if request is self._searched_for:
            self._searched_for, self._walk = None, None

    def first(self) -> Request | None:
        """Return the next request to admit that lacks no penalty slot. Cached until a request comes or goes,
        or a row begins, ends or changes its phase."""
        self._enqueue_ready()
        now = self._changes, self._holdings.rows.changes, self._holdings.penalty_slots.free > 0
        if now != self._first_at:
            self._first = next(self._by_service_key(penalised=now[2]), None)
            self._first_at = now
        return self._first

    def _by_service_key(self, penalised: bool = True) -> Iterator[Request]:
        """Yield all requests in the order of admission. penalised: include requests that need a penalty slot."""
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            yield from queue.in_order(penalised)
            return
        callers = self._holdings.callers
        rows, served = callers.rows(), callers.served(self._queues)
        heads = []
        for caller, queue in self._queues.items():
            requests = queue.in_order(penalised)
            if (request := next(requests, None)) is not None:
                heads.append((_service_key(request, rows[caller] > 0, served[caller]), request, requests))
        heapify(heads)
        while heads:
            _, request, requests = heads[0]
            yield request
            served[request.caller] += request.tokens.size
            if (following := next(requests, None)) is None:
                heappop(heads)
            else:
                heapreplace(heads, (_service_key(following, True, served[request.caller]), following, requests))

    def choose_row_to_yield(self, now_s: float, patience_s: float) -> Request | None:
        """Return the request whose row must leave for the first waiting request: the youngest row of the caller with
        the most rows.

        Returns None if the waiting request's caller has a row or has lacked one for less than patience_s; if there is
        room, or blocks or slots are coming; if no caller of this precedence or a lower one has two rows; or if the
        request would lack blocks even after all these rows left. Called in every turn of the loop; now_s: the engine's
        clock, in seconds.
        """
        holdings = self._holdings
        self._enqueue_ready()  # so that `first` below sees them
        if not holdings.callers.are_several or not self._queues:
            self._without_row, self._rows_then, self._changed_callers = {}, {}, set(self._queues)
            return None
        rows, slots = holdings.callers.rows(), holdings.penalty_slots
        self._note_callers_without_row(rows, now_s)
        lacking_s = next(iter(self._without_row.values()), now_s)  # of the caller that has lacked one for longest
        if lacking_s > now_s - patience_s or max(rows.values(), default=0) < 2:
            return None
        request = self.first()
        if not slots.free and (request is None or rows[request.caller]):
            request = next(iter(self))  # it lacks a penalty slot
        if request is None or rows[request.caller] or self._without_row[request.caller] > now_s - patience_s:
            return None
        lacks_penalty_slot = request.sampling.has_penalty and not slots.free
        if not lacks_penalty_slot and (self.next_admission() or self._is_searching() or self._is_coming(request)):
            return None
        if holdings.rows.fenced or (lacks_penalty_slot and slots.fenced):
            return None
        order = order_of_service(holdings.callers.running())
        others = [
            one
            for one in order
            if rows[one.caller] > 1
            and one.precedence <= request.precedence
            and (one.sampling.has_penalty or not lacks_penalty_slot)
        ]
        if not others or not self._finds_room(request, self._staying(order, others)):
            return None
        return max(others, key=lambda one: (rows[one.caller], order[one]))

    def _note_callers_without_row(self, rows: Counter[str], now_s: float) -> None:
        """Update since when waiting callers lack a row, for callers whose queue or rows changed. rows: rows of each
        caller."""
        for caller in self._changed_callers | (self._rows_then.keys() ^ rows.keys()):
            if caller in self._queues and not rows[caller]:
                self._without_row.setdefault(caller, now_s)
            else:
                self._without_row.pop(caller, None)
        self._rows_then, self._changed_callers = rows, set()

    def _staying(self, order: Mapping[Request, ServiceKey], leaving: Sequence[Request]) -> list[Request]:
        """Return the rows that remain if `leaving` leave, the youngest first. Each caller keeps a row. order: service
        keys of all rows."""
        staying, may_leave, rows = list[Request](), set(leaving), Counter(self._holdings.callers.rows())
        for one in sorted(order, key=order.__getitem__, reverse=True):
            if one in may_leave and rows[one.caller] > 1:
                rows[one.caller] -= 1
            else:
                staying.append(one)
        return staying

    def _finds_room(self, request: Request, staying: Sequence[Request]) -> bool:
        """Return whether the request gets all blocks that it needs beside these rows. False until its cached prefix is
        completely looked up."""
        pool, taken = self._holdings.pool, np.zeros(self._holdings.pool.total + 1, np.bool_)
        for one in staying:
            taken[np.asarray(one.blocks)] = True
        soon, at_most = self._needs_of(np.array([one.row_slot for one in staying], np.int64))
        missing = self._needed_beside(request, soon, at_most) - (pool.total - int(np.count_nonzero(taken)))
        if missing <= 0:
            return True
        is_found = request is self.first() and self._walk_of(request).advance(_SEARCHED_BLOCKS)
        cached = np.asarray(self._walk_of(request).hit.blocks if is_found else (), np.int64)
        return missing <= int(np.count_nonzero(taken[cached]))

    def _is_searching(self) -> bool:
        """Return whether there is room for the first request but the lookup of its cached prefix is not finished."""
        return self._next_with_room() is not None and self._walk is not None and not self._walk.at_end

    def _is_coming(self, request: Request) -> bool:
        """Return whether a row slot is free and fenced blocks cover what the request lacks."""
        holdings, pool = self._holdings, self._holdings.pool
        found = self._walk.hit if self._walk is not None and request is self._searched_for else None
        shared = len(found.blocks) - found.unowned if found is not None else 0
        missing = self._blocks_needed(request) - shared - pool.available
        return bool(holdings.rows.free and pool.fenced) and missing <= pool.fenced

    def next_admission(self) -> tuple[Request, Hit] | None:
        """Return the first request and its cached prefix; None if it must wait.

        Nobody is admitted while a row waits for blocks. Others pass a request that waits for a penalty slot. A long
        prefix is looked up in pieces; until the lookup ends, the result is None (see `search_further`).
        """
        found = self._next_with_room()
        if found is None:
            return None
        request, needed = found
        walk = self._walk_of(request)
        if not walk.advance(_SEARCHED_BLOCKS):
            return None
        return None if self._lacks_blocks(needed, walk.hit) else (request, walk.hit)

    def _lacks_blocks(self, needed: int, hit: Hit) -> bool:
        """True if the prefix and the available blocks are fewer than `needed`."""
        return needed - len(hit.blocks) > self._holdings.pool.available - hit.unowned

    def reasons(self) -> tuple[WaitReason, WaitReason]:
        """Why the newest plan left requests here: without penalties, and with them."""
        reason = self._reason() if self._count else WaitReason.LAUNCH
        return reason, reason if self._holdings.penalty_slots.free else WaitReason.PENALTY_SLOT

    def _reason(self) -> WaitReason:
        """Why the first one waits; the others wait behind it."""
        if not self._holdings.rows.free:
            return WaitReason.ROW_SLOT
        if self.first() is None:
            return WaitReason.LAUNCH  # all lack a penalty slot, or blocks that another completion computes
        if (found := self._next_with_room()) is None:
            return WaitReason.KV_BLOCKS
        request, needed = found
        if self._walk is None or request is not self._searched_for:
            return WaitReason.PROMPT_BUDGET  # the plan did not come to it
        if not self._walk.at_end:
            return WaitReason.LAUNCH
        return WaitReason.KV_BLOCKS if self._lacks_blocks(needed, self._walk.hit) else WaitReason.PROMPT_BUDGET

    def _walk_of(self, request: Request) -> PrefixWalk:
        """The search for the cached prefix of the request whose turn it is."""
        if self._walk is None or request is not self._searched_for:
            self._searched_for, self._walk = request, self._holdings.walk(request)
        return self._walk

    def search_further(self) -> bool:
        """Continue an unfinished prefix lookup if a request waits for it. Returns False if none does."""
        if self._walk is None or self._walk.at_end or self._next_with_room() is None:
            return False
        self.next_admission()
        return True

    def _next_with_room(self) -> tuple[Request, int] | None:
        """The first in the queue and the blocks it needs; None if it must wait, whatever is found of its prefix."""
        holdings, pool = self._holdings, self._holdings.pool
        if not len(self) or not holdings.rows.free or holdings.paused:
            return None
        request = self.first()
        if request is None:
            return None
        needed = self._blocks_needed(request)
        if needed > pool.available + pool.findable - pool.cached:
            return None  # even if every findable, owned block were in its prefix
        return request, needed

    def tokens_at_most(self, limits: SchedulerLimits, enough: int) -> int:
        """Prompt tokens of the first chunks of all who could be admitted with one launch, at most.

        enough: so many are as good as more.
        """
        found, holdings, pool = self.next_admission(), self._holdings, self._holdings.pool
        if found is None:
            return 0
        request, hit = found
        start = len(hit.blocks) * pool.block_size
        tokens = min(limits.cut(start), request.tokens.size) - start
        left = pool.available - pool.blocks_for(request.tokens.size) + len(hit.blocks)
        for other in self._next(min(holdings.rows.free, limits.admissions))[1:]:
            left -= max(1, pool.blocks_for(other.tokens.size) - pool.findable)  # as if all of these were in its prefix
            if left < 0 or tokens >= enough:
                break
            tokens += min(limits.cut(0), other.tokens.size)
        return tokens

    def _next(self, count: int) -> list[Request]:
        """Return the first `count` requests that lack no penalty slot."""
        found, slots = list[Request](), self._holdings.penalty_slots.free
        for request in self._by_service_key(penalised=slots > 0):
            if len(found) == count:
                break
            slots -= request.sampling.has_penalty
            if slots >= 0 or not request.sampling.has_penalty:
                found.append(request)
        return found

    def _blocks_needed(self, request: Request) -> int:
        """Return how many blocks must be available or shared before a request gets a row, so that rows are not evicted
        soon after.

        This counts the request's known tokens, and for each running row the rest of its known tokens or one block. With
        each eviction a request needs more of its greatest length. A protected request needs room for itself and all
        running rows at their greatest length.
        """
        return self._needed_beside(request, *self._needed_by_rows())

    def _needed_beside(self, request: Request, soon: int, at_most: int) -> int:
        """Return the same beside rows that still need these blocks: see `_needs_of`."""
        most = self._holdings.blocks_at_most(request)
        if request.is_protected:
            return most + at_most
        own = self._holdings.pool.blocks_for(request.tokens.size) + (1 << request.evictions) - 1
        return min(most, own) + soon

    def _needed_by_rows(self) -> tuple[int, int]:
        """Return how many blocks running rows still need: soon, and at most. Cached until a row begins, ends or changes
        its phase, or a block is allocated."""
        rows, pool = self._holdings.rows, self._holdings.pool
        now = rows.changes, pool.allocated_total
        if now != self._running_at:
            self._running = self._needs_of(((rows.phase == _PREFILL) | (rows.phase == _DECODE)).nonzero()[0])
            self._running_at = now
        return self._running

    def _needs_of(self, running: NDArray[np.int64]) -> tuple[int, int]:
        """Return how many blocks these rows, [n], still need: soon, and at most."""
        rows, size = self._holdings.rows, self._holdings.pool.block_size
        have = rows.num_blocks[running]
        may_need = ceil_div(rows.max_len[running] - 1, size) - have  # the last token is never forwarded
        soon = np.maximum(1, ceil_div(rows.known_len[running], size) - have)
        return sum(np.minimum(may_need, soon).tolist()), sum(may_need.tolist())
