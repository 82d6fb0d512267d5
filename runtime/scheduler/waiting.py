"""The queue: who waits for a row, by rank, and who may have one now.

However many wait, finding the first of them, adding one and taking one away is a search in an ordered list: nobody
looks at all of them. What is known of the first one's cached prefix is kept from launch to launch.
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
_rank: Final = attrgetter("rank")
_Turn = tuple[int, bool, int, int]
_LOOKED_AT: Final = 36  # blocks of a prefix that one look adds, in some 75 microseconds; mostly a turn has two


def _turn_of(request: Request, has_row: bool, served: int) -> _Turn:
    """What the first requests of callers are sorted by."""
    return -request.precedence, has_row, served, request.order


@dataclass(slots=True)
class _Line:
    """Requests of one caller by rank. penalised: those that need a penalty slot, so that they can be passed while there
    is none."""

    plain: list[Request] = field(default_factory=list)
    penalised: list[Request] = field(default_factory=list)

    def of(self, request: Request) -> list[Request]:
        return self.penalised if request.sampling.has_penalty else self.plain

    def in_order(self, penalised: bool = True) -> Iterator[Request]:
        """By rank. penalised: those that need a penalty slot, too."""
        return merge(self.plain, self.penalised, key=_rank) if penalised else iter(self.plain)


class WaitingQueue:
    """Requests without a row. Callers take turns: one without a row comes first, of others the one that was served the
    fewest tokens. Of one caller those of a higher priority come first, then first come first served. A request that
    outranks others' comes before all of a lower precedence.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._lines: dict[str, _Line] = {}  # by caller, of those with a request here
        self._count = 0
        self._holdings = holdings
        self._looked_for: Request | None = None  # whose prefix the walk is about
        self._walk: PrefixWalk | None = None
        self._running: tuple[int, int] = (0, 0)  # see `_needed_by_rows`
        self._running_at = (-1, -1)
        self._first: Request | None = None  # see `first`
        self._first_at = (-1, -1, False)
        self._changes = 0  # grows with each request that comes or goes
        self._without_row: dict[str, float] = {}  # since when callers here lack a row, the longest first
        self._rows_then: Counter[str] = Counter()  # of each caller, when these were looked at
        self._lines_moved = set[str]()  # callers whose line has begun or ended since
        # Counted, and in no line: see `SharedPrompt.holds_back`.
        self._held_back = dict[SharedPrompt, dict[Request, None]]()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        return self._in_turn()

    @property
    def held_back(self) -> int:
        """Requests that wait for the blocks of their prompt, which another completion computes."""
        return sum(map(len, self._held_back.values()))

    def add(self, request: Request) -> None:
        self._count += 1
        prompt = request.shared_prompt
        if prompt is not None and prompt.holds_back(request):
            self._held_back.setdefault(prompt, {})[request] = None
        else:
            self._line_up(request)

    def _line_up(self, request: Request) -> None:
        if request.caller not in self._lines:
            self._lines[request.caller] = _Line()
            self._lines_moved.add(request.caller)
        line = self._lines[request.caller].of(request)
        if not line or line[-1].rank < request.rank:
            line.append(request)  # as nearly everybody
        else:
            insort(line, request, key=_rank)
        self._changes += 1

    def _let_in(self) -> None:
        """Those line up whose prompts' blocks can be found by now."""
        for prompt in self._holdings.shared.take_ready():
            for request in self._held_back.pop(prompt, ()):
                self._line_up(request)

    def remove(self, request: Request) -> None:
        """It is admitted, or has ended. Raises ValueError if it does not wait."""
        prompt = request.shared_prompt
        if prompt is not None and request in self._held_back.get(prompt, ()):
            del self._held_back[prompt][request]
            if not self._held_back[prompt]:
                del self._held_back[prompt]
            self._count -= 1
            return
        own = self._lines.get(request.caller, _Line())
        line = own.of(request)
        place = bisect_left(line, request.rank, key=_rank)
        if place == len(line) or line[place] is not request:
            raise ValueError("the request does not wait")
        del line[place]
        if not own.plain and not own.penalised:
            del self._lines[request.caller]
            self._lines_moved.add(request.caller)
        self._count -= 1
        self._changes += 1
        if request is self._looked_for:
            self._looked_for, self._walk = None, None

    def first(self) -> Request | None:
        """Whose turn it is, of those who lack no penalty slot. It is decided again when a request comes or goes, and
        when a row begins, ends or moves on to another phase."""
        self._let_in()
        now = self._changes, self._holdings.rows.changes, self._holdings.penalty_slots.free > 0
        if now != self._first_at:
            self._first = next(self._in_turn(penalised=now[2]), None)
            self._first_at = now
        return self._first

    def _in_turn(self, penalised: bool = True) -> Iterator[Request]:
        """All, in the order in which they would get rows. penalised: those that need a penalty slot, too."""
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            yield from line.in_order(penalised)
            return
        callers = self._holdings.callers
        rows, served = callers.rows(), callers.served(self._lines)
        heads = []
        for caller, line in self._lines.items():
            requests = line.in_order(penalised)
            if (request := next(requests, None)) is not None:
                heads.append((_turn_of(request, rows[caller] > 0, served[caller]), request, requests))
        heapify(heads)
        while heads:
            _, request, requests = heads[0]
            yield request
            served[request.caller] += request.tokens.size
            if (following := next(requests, None)) is None:
                heappop(heads)
            else:
                heapreplace(heads, (_turn_of(following, True, served[request.caller]), following, requests))

    def who_gives_way(self, now_s: float, patience_s: float) -> Request | None:
        """The row that has to leave for the request whose turn it is: the youngest one of the caller that holds most.

        None where the request's caller has a row, or has lacked one for less than patience_s; where there is room, or
        some is coming; where no caller of this precedence or a lower one has two rows; and where the request would lack
        blocks if all rows left that may. It is asked in every turn, at now_s on the engine's clock.
        """
        held = self._holdings
        self._let_in()  # whoever is first below is in a line now
        if not held.callers.are_several or not self._lines:
            self._without_row, self._rows_then, self._lines_moved = {}, Counter(), set(self._lines)
            return None
        rows, slots = held.callers.rows(), held.penalty_slots
        self._look_who_lacks_a_row(rows, now_s)
        lacking_s = next(iter(self._without_row.values()), now_s)  # of who lacks one for longest
        if lacking_s > now_s - patience_s or max(rows.values(), default=0) < 2:
            return None
        request = self.first()
        if not slots.free and (request is None or rows[request.caller]):
            request = next(iter(self))  # it lacks a penalty slot
        if request is None or rows[request.caller] or self._without_row[request.caller] > now_s - patience_s:
            return None
        lacks_penalty_slot = request.sampling.has_penalty and not slots.free
        if not lacks_penalty_slot and (self.next_admission() or self._is_looking() or self._comes_soon(request)):
            return None
        if held.rows.fenced or (lacks_penalty_slot and slots.fenced):
            return None
        order = order_of_service(held.callers.running())
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

    def _look_who_lacks_a_row(self, rows: Counter[str], now_s: float) -> None:
        """Of callers that wait. Only those are looked at whose lines or rows have begun or ended since the last time.
        rows: of each."""
        for caller in self._lines_moved | (self._rows_then.keys() ^ rows.keys()):
            if caller in self._lines and not rows[caller]:
                self._without_row.setdefault(caller, now_s)
            else:
                self._without_row.pop(caller, None)
        self._rows_then, self._lines_moved = rows, set()

    def _staying(self, order: Mapping[Request, ServiceKey], leaving: Sequence[Request]) -> list[Request]:
        """The rows that stay if these leave, the youngest first, as long as their callers keep a row. order: of all."""
        staying, may_leave, rows = list[Request](), set(leaving), Counter(self._holdings.callers.rows())
        for one in sorted(order, key=order.__getitem__, reverse=True):
            if one in may_leave and rows[one.caller] > 1:
                rows[one.caller] -= 1
            else:
                staying.append(one)
        return staying

    def _finds_room(self, request: Request, staying: Sequence[Request]) -> bool:
        """The request has all the blocks that it needs where only these rows run. Its cached prefix is looked up for
        that; until all of it is, False."""
        pool, taken = self._holdings.pool, np.zeros(self._holdings.pool.total + 1, np.bool_)
        for one in staying:
            taken[np.asarray(one.blocks)] = True
        soon, at_most = self._needs_of(np.array([one.row_slot for one in staying], np.int64))
        missing = self._needed_beside(request, soon, at_most) - (pool.total - int(np.count_nonzero(taken)))
        if missing <= 0:
            return True
        is_found = request is self.first() and self._walk_of(request).look(_LOOKED_AT)
        cached = np.asarray(self._walk_of(request).hit.blocks if is_found else (), np.int64)
        return missing <= int(np.count_nonzero(taken[cached]))

    def _is_looking(self) -> bool:
        """There is room for the first request, whose cached prefix is not looked up to its end."""
        return self._next_with_room() is not None and self._walk is not None and not self._walk.at_end

    def _comes_soon(self, request: Request) -> bool:
        """A row slot is free and the blocks that the request lacks are coming."""
        held, pool = self._holdings, self._holdings.pool
        found = self._walk.hit if self._walk is not None and request is self._looked_for else None
        shared = len(found.blocks) - found.unheld if found is not None else 0
        missing = self._blocks_needed(request) - shared - pool.available
        return bool(held.rows.free and pool.fenced) and missing <= pool.fenced

    def next_admission(self) -> tuple[Request, Hit] | None:
        """The first in the queue, and the cached prefix that it begins with; None if it must wait.

        Nobody is admitted while a row waits for blocks. A request that waits for a penalty slot lets others pass. A
        long prefix is looked up in pieces: until all of it is, None, and `look_further`.
        """
        found = self._next_with_room()
        if found is None:
            return None
        request, needed = found
        walk = self._walk_of(request)
        if not walk.look(_LOOKED_AT):
            return None
        return None if self._lacks_blocks(needed, walk.hit) else (request, walk.hit)

    def _lacks_blocks(self, needed: int, hit: Hit) -> bool:
        """True if the prefix and the available blocks are fewer than `needed`."""
        return needed - len(hit.blocks) > self._holdings.pool.available - hit.unheld

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
        if self._walk is None or request is not self._looked_for:
            return WaitReason.PROMPT_BUDGET  # the plan did not come to it
        if not self._walk.at_end:
            return WaitReason.LAUNCH
        return WaitReason.KV_BLOCKS if self._lacks_blocks(needed, self._walk.hit) else WaitReason.PROMPT_BUDGET

    def _walk_of(self, request: Request) -> PrefixWalk:
        """The search for the cached prefix of the request whose turn it is."""
        if self._walk is None or request is not self._looked_for:
            self._looked_for, self._walk = request, self._holdings.walk(request)
        return self._walk

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
        found, slots = list[Request](), self._holdings.penalty_slots.free
        for request in self._in_turn(penalised=slots > 0):
            if len(found) == count:
                break
            slots -= request.sampling.has_penalty
            if slots >= 0 or not request.sampling.has_penalty:
                found.append(request)
        return found

    def _blocks_needed(self, request: Request) -> int:
        """Blocks that must be there, or shared, before a request gets a row, so that rows are not evicted soon after.

        All that is known of it, and what running rows still need for what is known of them, or a block to go on. The
        more often it was evicted, the more of what it may become. A protected request needs room for itself and for all
        running rows at their longest.
        """
        return self._needed_beside(request, *self._needed_by_rows())

    def _needed_beside(self, request: Request, soon: int, at_most: int) -> int:
        """The same beside rows that still need so many blocks: see `_needs_of`."""
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
            self._running = self._needs_of(((rows.phase == _PREFILL) | (rows.phase == _DECODE)).nonzero()[0])
            self._running_at = now
        return self._running

    def _needs_of(self, running: NDArray[np.int64]) -> tuple[int, int]:
        """Blocks that these rows still need: soon, and at most. [n]"""
        rows, size = self._holdings.rows, self._holdings.pool.block_size
        have = rows.num_blocks[running]
        may_need = ceil_div(rows.max_len[running] - 1, size) - have  # the last token is never forwarded
        soon = np.maximum(1, ceil_div(rows.known_len[running], size) - have)
        return sum(np.minimum(may_need, soon).tolist()), sum(may_need.tolist())
