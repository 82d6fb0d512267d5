"""A scheduler that is held to what it promises at the moment it decides: who pauses, who is evicted, who comes in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.memory.prefix_cache import Hit
from runahead.runtime.plan import LaunchPlan
from runahead.runtime.scheduler.drafts import DraftChoice, FixedChoice
from runahead.runtime.scheduler.ledger import Ledger
from runahead.runtime.scheduler.outcomes import Deferred, Ending
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.plan_builder import Planned
from runahead.runtime.scheduler.request import MAX_EVICTIONS, Request
from runahead.runtime.scheduler.rows import RowPhase, Rows
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.scheduler.steady_decode import SteadyDecode
from tests.runtime.scheduler.taken_over import continues


def _rank(row: Request) -> tuple[int, bool, int]:
    """Of one caller: higher priority first, of equals those evicted as often as may be, then first come first
    served."""
    return -row.priority, row.evictions < MAX_EVICTIONS, row.order


def _order_of_service(row: Request, rows: list[Request]) -> tuple[int, bool, int, int]:
    """Higher precedence first, of equals those evicted as often as may be, then callers in turn. rows: all that run."""
    before = [one for one in rows if one.caller == row.caller and _rank(one) < _rank(row)]
    return -row.precedence, row.evictions < MAX_EVICTIONS, len(before), row.order


def blocks_needed(scheduler: Scheduler) -> tuple[int, int]:
    """Blocks that running rows lack: for what is known of each, or to go on; and for their greatest lengths."""
    rows, pool = scheduler.rows, scheduler.pool
    soon = most = 0
    for request in scheduler.holdings.requests():
        if rows.phase[request.row_slot] in (RowPhase.PREFILL, RowPhase.DECODE):
            lacks = scheduler.holdings.blocks_at_most(request) - len(request.blocks)
            soon += min(lacks, max(1, pool.blocks_for(request.tokens.size) - len(request.blocks)))
            most += lacks
    return soon, most


class HeldToItsWord(Scheduler):
    """Asserts, as ledger rules 7 and 8 and the promise about logits that are not finite say it.

    choice: of K. may_decode, prompts: rows that might decode in the plan made last, and rows that might have a chunk in
    it, when it was begun: before it was known which of them find their blocks, or a place in the plan.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        rows: Rows,
        pool: BlockPool,
        ledger: Ledger[Deferred],
        choice: DraftChoice | None = None,
    ) -> None:
        super().__init__(limits, rows, pool, ledger, choice)
        self.choice: DraftChoice = choice or FixedChoice(limits.drafts)
        self.may_decode = self.prompts = 0
        self._newest_steady: SteadyDecode | None = None
        steady = self.drafts.steady_decode

        def remembered_steady(plan: LaunchPlan, block_size: int) -> SteadyDecode | None:
            self._newest_steady = steady(plan, block_size)
            return self._newest_steady

        self.drafts.steady_decode = remembered_steady  # type: ignore[method-assign]
        held, commits = self.holdings, self.commits
        allocate_row, ending = held.allocate_row, commits._ending

        def checked_allocate_row(request: Request, hit: Hit) -> None:
            self._check_room(request, hit)
            assert not held.paused, "a request was admitted while rows wait for blocks"
            ready = [one for one in self.waiting if held.penalty_slots.free or not one.sampling.has_penalty]
            better = [other for other in ready if other.caller == request.caller and _rank(other) < _rank(request)]
            assert not better, "a request was admitted before a better one of its caller"
            turn = self._service_key(request)
            assert all(turn <= self._service_key(one) for one in ready), (
                "a request was admitted before its caller's turn"
            )
            allocate_row(request, hit)

        def checked_ending(slot: int, token: int, stopped: bool, failed: bool, nothing_left: bool) -> Ending:
            request = held.request(slot)
            own = request.blocks[request.shared :]
            ended = ending(slot, token, stopped, failed, nothing_left)
            if failed and not nothing_left:
                assert not any(block in pool._contents for block in own), "blocks of a row that failed can be found"
            return ended

        held.allocate_row = checked_allocate_row  # type: ignore[method-assign]
        commits._ending = checked_ending  # type: ignore[method-assign]

    def _service_key(self, request: Request) -> tuple[int, bool]:
        """Higher precedence first, then callers without a row. Tokens served count as they were when the turn was
        decided."""
        phase = self.rows.phase
        rows = [one for one in self.holdings.requests() if phase[one.row_slot] != RowPhase.LEAVING]
        return -request.precedence, any(one.caller == request.caller for one in rows)

    def plan(self) -> Planned | None:
        self.may_decode = self.rows.decoding().size
        self.prompts = int(np.count_nonzero(self.rows.phase == RowPhase.PREFILL))
        decoding = self._decoding()
        planned = super().plan()
        if planned is not None:
            if continues(planned.plan, self._newest_steady):
                self._check_continued(planned.plan, decoding)
            chunks = [chunk.tokens.size for chunk in planned.plan.chunks]
            decodes = planned.plan.rows.size > len(chunks)
            most = self.limits.mixed_prefill_tokens if decodes else self.limits.max_prefill_tokens
            assert len(chunks) < 2 or sum(chunks) <= most, "a launch carries more prompt tokens than it may"
            for chunk in planned.plan.chunks:
                end, cut = chunk.start + chunk.tokens.size, self._cut(chunk.start, self.holdings.request(chunk.slot))
                assert end == cut or end % self.limits.piece_tokens == 0, "a chunk is cut anywhere"
        return planned

    def _decoding(self) -> dict[int, tuple[int, bool]]:
        """Of each row that decodes: its length with the next token, and whether it needs a block for that."""
        rows, slots = self.rows, self.rows.decoding()
        lengths = rows.most_len[slots] + 1
        needs = lengths > rows.num_blocks[slots] * self.pool.block_size
        return dict(zip(slots.tolist(), zip(lengths.tolist(), needs.tolist(), strict=True), strict=True))

    def _check_continued(self, plan: LaunchPlan, decoding: dict[int, tuple[int, bool]]) -> None:
        """A plan of steady decode is the plan that the columns ask for: it has every row, none beside a row that
        pauses or prefills, and a block for each row whose tokens do not fit into those that it holds. decoding: as the
        columns were before."""
        rows, slots = self.rows, [*decoding]
        assert not self.holdings.paused and not np.count_nonzero(rows.phase == RowPhase.PREFILL)
        assert plan.rows.tolist() == slots, "steady decode goes on without a row, or with one that may not"
        assert plan.samples.all() and not plan.drafts, "a row of steady decode has no token, or a draft"
        given = {slot for slot, _, block in plan.appends.tolist() if block in self.holdings.request(slot).blocks}
        needing = {slot for slot, (_, needs) in decoding.items() if needs}
        assert given == needing, "steady decode gives a block to a row that has room, or forgets one"
        lengths = [length for length, _ in decoding.values()]
        assert rows.most_len[slots].tolist() == lengths, "steady decode goes on with other lengths"
        assert plan.needs_full == bool(rows.needs_full[slots].any()), (
            "steady decode has another form than its rows need"
        )
        assert plan.masked == bool(rows.may_hold[slots].any()), "steady decode has no masks for its rows, or for nobody"

    def _check_room(self, request: Request, hit: Hit) -> None:
        """A request gets a row when its blocks are there, and those that running rows need: what is known of each and a
        block to go on; of one that was evicted 1, 3 or all blocks more, after its first, second and third time."""
        own, own_most = self.pool.blocks_for(request.tokens.size), self.holdings.blocks_at_most(request)
        soon, most = blocks_needed(self)
        needed = min(own_most, own + (0, 1, 3)[request.evictions]) + soon if request.evictions < 3 else own_most + most
        unowned = sum(block in self.pool._cached for block in hit.blocks)
        assert hit.unowned == unowned, f"{hit.unowned} blocks of a prefix are said to be available, and {unowned} are"
        left = self.pool.available - unowned
        assert needed - len(hit.blocks) <= left, "a request was admitted without room for it and the rows beside it"

    def _ration_blocks(self, crossing: NDArray[np.int64], wanted: NDArray[np.int64], chunks: NDArray[np.int64]) -> None:
        rows, pool = self.rows, self.pool
        going = [
            row for row in self.holdings.requests() if rows.phase[row.row_slot] in (RowPhase.PREFILL, RowPhase.DECODE)
        ]
        needs = {
            slot: -(-int(tokens) // pool.block_size) for slot, tokens in zip(crossing.tolist(), wanted, strict=True)
        }
        requests = {slot: self.holdings.request(slot) for slot in [*crossing.tolist(), *chunks.tolist()]}
        for slot in chunks.tolist():
            needs[slot] = -(-self._cut(int(rows.least_len[slot]), requests[slot]) // pool.block_size)
        needs = {slot: blocks - len(requests[slot].blocks) for slot, blocks in needs.items()}
        available, coming = pool.available, pool.fenced
        super()._ration_blocks(crossing, wanted, chunks)
        evicted = [row for row in going if rows.phase[row.row_slot] == RowPhase.LEAVING]
        assert len(evicted) <= 1, "two rows were evicted for one plan"
        waiting = sorted((row for row in going if row.row_slot in needs), key=lambda row: _order_of_service(row, going))
        while waiting and needs[waiting[0].row_slot] <= available:
            available -= needs[waiting.pop(0).row_slot]
        for row in waiting:
            assert (
                row.row_slot in self.holdings.paused or row in evicted or not row.blocks or not needs[row.row_slot]
            ), "a row goes on although one before it waits for blocks"
        for victim in evicted:
            self._check_victim(victim, waiting, going, available + coming, needs)

    def _check_victim(
        self, victim: Request, waiting: list[Request], going: list[Request], at_most: int, needs: dict[int, int]
    ) -> None:
        """Nobody is evicted while free + coming covers the need, nor before all wait or one of a higher priority does;
        then it is the last that is served of the lowest precedence, of those not evicted too often if there are any."""
        first = waiting[0]
        assert needs[first.row_slot] > at_most, "a row was evicted while what is free and coming covers the need"
        assert victim is not first, "the first that waits was evicted"
        is_outranked = victim.precedence < first.precedence
        assert len(waiting) == len(going) or is_outranked, "a row was evicted while others go on"
        others = [row for row in going if row is not first]
        assert victim.precedence == min(row.precedence for row in others), "a row of a higher precedence was evicted"
        alike = [row for row in others if row.precedence == victim.precedence and row.evictions < MAX_EVICTIONS]
        keys = {row: _order_of_service(row, going) for row in others}
        assert all(keys[row] <= keys[victim] for row in alike), "a row that is served later was not evicted"
        assert not alike or victim.evictions < MAX_EVICTIONS, "a row was evicted more often than any may be"
