"""A caller without a row gets one where another caller has several, however much that one has waiting."""

from __future__ import annotations

from collections import Counter

from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import RowPhase
from tests.simulation.assembly import SimulatedChain
from tests.simulation.script import World


class FairShares:
    """Callers without a row wait for a bounded number of turns, where nobody outranks them.

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
        if max(rows.values(), default=0) < 2:
            entitled.clear()
        self._turns = Counter({one: self._turns[one] + (not rested) for one in entitled})
        for caller, turns in self._turns.items():
            assert turns <= self._bound, f"{caller} has had no row for {turns} turns beside a caller with several"
