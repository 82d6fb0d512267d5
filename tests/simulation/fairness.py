"""A caller without a row gets one where another caller has several, however much that one has waiting."""

from __future__ import annotations

from collections import Counter
from itertools import chain as joined

from runahead.runtime.scheduler.rationing import order_of_service
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import RowPhase
from runahead.runtime.scheduler.scheduler import Scheduler
from tests.simulation.assembly import SimulatedChain
from tests.simulation.script import World


class FairShares:
    """Callers without a row wait for a bounded number of turns, where nobody outranks them, and where the request whose
    turn it is would have room if all but one row of each caller left. Otherwise no row leaves.

    A row leaves within the launches in flight and gives back what it held. That may happen for each row of others but
    one, and once for each caller that waits. Turns in which the device rested count for nothing. left: rows that have
    left for a caller without one.
    """

    def __init__(self, chain: SimulatedChain, world: World, depth: int, callers: int) -> None:
        self._is_at_once = world.patience_s == 0
        self._bound = (1 + callers) * (1 + world.max_rows) * (depth + 4)
        self._turns = Counter[str]()  # of each caller, that have a right to a row since
        self._rests = 0
        self.left = 0
        scheduler = chain.engine.scheduler
        evict = scheduler.evict

        def counted(request: Request) -> None:
            self.left += request.gives_way
            if request.gives_way:
                assert _may_find_room(scheduler, finds_prefix=True), f"{request.request_id} leaves in vain"
            evict(request)

        scheduler.evict = counted  # type: ignore[method-assign]

    def look(self, chain: SimulatedChain) -> None:
        """Raises AssertionError."""
        scheduler = chain.engine.scheduler
        live = scheduler.holdings.requests()
        rests = chain.device.rests + (chain.masks.rests if chain.masks else 0)
        rested, self._rests = rests > self._rests, rests
        if not self._is_at_once:
            return
        running = [one for one in live if scheduler.rows.phase[one.row_slot] != RowPhase.LEAVING]
        rows, waiting = Counter(one.caller for one in running), list(scheduler.waiting)
        highest = max((one.precedence for one in [*running, *waiting]), default=0)
        entitled = {one.caller for one in waiting if not rows[one.caller] and one.precedence == highest}
        if max(rows.values(), default=0) < 2 or not _may_find_room(scheduler, finds_prefix=False):
            entitled.clear()
        self._turns = Counter({one: self._turns[one] + (not rested) for one in entitled})
        for caller, turns in self._turns.items():
            assert turns <= self._bound, f"{caller} has had no row for {turns} turns beside a caller with several"


def _may_find_room(scheduler: Scheduler, *, finds_prefix: bool) -> bool:
    """A request whose caller has no row has room where each other caller keeps the row that is served first, and those
    of a higher precedence. finds_prefix: all of its blocks that a row holds may be in its cached prefix."""
    pool, rows = scheduler.pool, scheduler.rows
    running = scheduler.holdings.callers.running()
    count = Counter(one.caller for one in running)
    heads = [scheduler.waiting.first(), next(iter(scheduler.waiting), None)]
    for request in (one for one in heads if one is not None and not count[one.caller]):
        lacks_slot = request.sampling.has_penalty and not scheduler.holdings.penalty_slots.free
        keys, left, stay = order_of_service(running), Counter(count), []
        for one in sorted(running, key=lambda one: keys[one], reverse=True):
            may_leave = one.precedence <= request.precedence and (one.sampling.has_penalty or not lacks_slot)
            if may_leave and left[one.caller] > 1:
                left[one.caller] -= 1
            else:
                stay.append(one)
        most = [pool.blocks_for(one.max_len - 1) - len(one.blocks) for one in stay]
        known = [pool.blocks_for(int(rows.known_len[one.row_slot])) - len(one.blocks) for one in stay]
        own = pool.blocks_for(request.max_len - 1)
        needed = own + sum(most)
        if not request.is_protected:
            soon = sum(min(at_most, max(1, now)) for at_most, now in zip(most, known, strict=True))
            needed = min(own, pool.blocks_for(request.tokens.size) + (1 << request.evictions) - 1) + soon
        taken = set(joined.from_iterable(one.blocks for one in stay))
        shared = min(len(taken), (request.tokens.size - 1) // pool.block_size) if finds_prefix else 0
        if needed - shared <= pool.total - len(taken):
            return True
    return False
