"""The scheduler: which rows the next launch has. It uses no clock, device or thread.

A row with a prompt of 5 tokens (p), in blocks of 4. Launch 13 is committed and brought its third token (t); launches 14
and 15 are in flight, and only the device knows their tokens:

    block table       17          4             9         reserved with plan 14, whose token crosses the boundary
    tokens       | p  p  p  p | p  t  t  t | 14 15       |
                                           ^     ^
                            committed_len = 8   least_len = most_len = 10; see drafts.py for where they differ

The scheduler never waits for a token: it plans from lengths, which it can bound in advance. A row that has ended is
void in the launches already enqueued, one wasted row each, and nothing is rolled back.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.memory.block_pool import NO_SLOT, BlockPool
from runahead.runtime.plan import Chunk, LaunchPlan
from runahead.runtime.rounding import ceil_div
from runahead.runtime.scheduler.commits import Commits
from runahead.runtime.scheduler.drafts import DraftChoice, FixedChoice, draft_policy
from runahead.runtime.scheduler.holdings import Holdings
from runahead.runtime.scheduler.ledger import NO_EPOCHS, NO_SLOTS, Ledger, LedgerError
from runahead.runtime.scheduler.new_row import begin_again, begin_row, words_of
from runahead.runtime.scheduler.outcomes import NOT_A_TOKEN, Deferred, Ending, Eviction, Release
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.plan_builder import NO_APPENDS, PlanBuilder, Planned, prompt_logprob_ranges
from runahead.runtime.scheduler.rationing import Need, choose_victim, order_of_service, ration
from runahead.runtime.scheduler.request import NO_EVENTS, NeverFits, Request, Tally
from runahead.runtime.scheduler.rows import RowPhase, Rows
from runahead.runtime.scheduler.steady_decode import SteadyDecode
from runahead.runtime.scheduler.waiting import WaitingQueue
from runahead.runtime.wire.parameters import FinishReason

# Members of an enum are looked up slowly; the steady step reads these thousands of times a second.
_PREFILL = int(RowPhase.PREFILL)
_LEAVING = int(RowPhase.LEAVING)


class Scheduler:
    """Gives requests rows and plans launches. `commits` records the launches' tokens.

    choice: chooses the drafts of each launch; None: always `limits.drafts`.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        rows: Rows,
        pool: BlockPool,
        ledger: Ledger[Deferred],
        choice: DraftChoice | None = None,
    ) -> None:
        self.limits = limits
        self.rows = rows
        self.pool = pool
        self.ledger = ledger
        choice = choice or FixedChoice(limits.drafts)
        forced = limits.forced_drafts, limits.forced_rows, limits.guesses_along_masks
        self.drafts = draft_policy(choice, rows, ledger, limits.draft_rows, *forced)
        self.tally = Tally()
        self.holdings = Holdings(limits, rows, pool, ledger)
        self.waiting = WaitingQueue(self.holdings)
        self.commits = Commits(limits, self.holdings, self.tally, self.drafts)
        self._arrivals = 0
        self._steady: SteadyDecode | None = None  # steady decode after the newest plan

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Queue a request. Raises NeverFits if the whole pool can't hold it."""
        if self.holdings.blocks_at_most(request) > self.pool.total:
            capacity = self.pool.total * self.pool.block_size
            raise NeverFits(
                f"the request may grow to {request.max_len} tokens, {request.prompt.size} of them its prompt; "
                f"the KV cache holds {capacity}",
                prompt_alone=request.prompt.size > capacity,
            )
        self._arrivals += 1
        request.order = self._arrivals
        self.holdings.callers.enter(request.caller)
        self.waiting.add(request)
        self.tally.counters["submitted"] += 1

    def stop(self, request: Request, reason: FinishReason) -> Ending:
        """End a request outside a commit, in any phase; its tokens in flight are void."""
        if reason in (FinishReason.ABORTED, FinishReason.CANCELLED):
            self.tally.aborted[self.holdings.phase_of(request)] += 1
            self.tally.event("aborted")
        else:  # a stop string that the front end found, or a prompt that is not finite
            self.tally.event("finished")
        if reason == FinishReason.NON_FINITE:
            self.holdings.forget_written(request)
        if request.row_slot == NO_SLOT:
            self.waiting.remove(request)
            self.holdings.leave(request)
        else:
            self.holdings.end_row(request)
        self.tally.finished[reason.name] += 1
        return Ending(request, reason)

    def evict(self, request: Request) -> None:
        """Evict a row: it gives up its blocks. Its tokens in flight still count; then the request waits again."""
        self.holdings.evict(request)
        self.tally.event("evicted")

    def release(self, resource: Deferred) -> Release:
        """Release what the fence let go. Returns what no request has any more."""
        if not isinstance(resource, Eviction):
            return self.holdings.release(resource)
        freed = self.holdings.evicted(resource)
        if freed.row_slot != NO_SLOT:
            self.waiting.add(resource.request)
        return freed

    # ------------------------------------------------------------ planning

    def prompt_tokens_wanted(self) -> int:
        """Return the most prompt tokens that the next plan would have: of rows' next chunks, and of requests to be
        admitted.

        No request counts while rows are paused or while the first request's prefix lookup is unfinished. The result
        only decides whether to plan now; `plan` bounds the plan again.
        """
        rows, limits = self.rows, self.limits
        slots, tokens = (rows.phase == _PREFILL).nonzero()[0], 0
        if slots.size:
            starts = rows.least_len[slots]
            tokens = int((np.minimum(limits.cuts(starts), rows.known_len[slots]) - starts).sum())
        if tokens < limits.max_prefill_tokens and self.waiting:
            tokens += self.waiting.tokens_at_most(limits, limits.max_prefill_tokens - tokens)
        return min(limits.max_prefill_tokens, tokens)

    def plan(self) -> Planned | None:
        """Return the next launch's plan, or None if no row can go on and nothing is left to sample.

        Its blocks and slots are allocated and its rows' lengths advanced, so it must be launched.
        """
        return self._plan_steady() or self._plan_anew()

    def _plan_steady(self) -> Planned | None:
        """Return the next plan of steady decode: the same rows, one token further. None if a decision is needed.

        It equals the plan that `_plan_anew` would make, but reads only what may have changed.
        """
        steady, number = self._steady, self.ledger.launched + 1
        if steady is None or not steady.advance_to(number):
            return None
        if self.waiting and self.waiting.next_admission() is not None:
            return None
        rows, slots = self.rows, steady.plan.rows
        appends, crossed = NO_APPENDS, NO_SLOTS
        crossing = steady.crossing(number)
        if crossing.size:
            builder = self._builder(number)
            if crossing.size > min(self.pool.available, builder.appends_left(slots.size)):
                return None
            self._reserve_crossed(builder, crossing, rows.most_len[crossing] + 1, slots.size)
            appends, crossed = builder.appends(), builder.crossed()
        rows.plan_one_more(steady.step)
        plan = LaunchPlan(
            number=number,
            rows=slots,
            samples=steady.plan.samples,
            row_list_changed=False,
            appends=appends,
            tokens=slots.size,
            sample_rows=slots.size,
            needs_full=steady.needs_full,
            is_decode=True,
            masked=steady.masked,
        )
        sampled, epochs, samples = self.ledger.last_rows()  # steady decode keeps these rows
        return Planned(
            plan,
            sampled,
            epochs,
            samples,
            row_epochs=epochs,
            events=self.tally.hand_over_events() if self.tally.events else NO_EVENTS,
            crossed_slots=crossed,
            crossed_epochs=rows.epoch[crossed] if crossed.size else NO_EPOCHS,
        )

    def _plan_anew(self) -> Planned | None:
        """Return the next plan from the needs of every row, or None."""
        number, slots = self.ledger.launched + 1, self.rows.decoding()
        chunks = (self.rows.phase == _PREFILL).nonzero()[0]
        guesses, self._steady = self.drafts.guesses(number, slots, chunks.size), None
        builder, wanted = self._builder(number, slots.size), self.drafts.kv_tokens(slots, guesses)
        crossing = wanted > self.rows.num_blocks[slots] * self.pool.block_size
        if chunks.size or self.holdings.paused or np.count_nonzero(crossing):
            self._ration_blocks(slots[crossing], wanted[crossing], chunks)
            if self.holdings.paused:
                going = self._may_run(slots)
                slots, wanted, crossing = slots[going], wanted[going], crossing[going]
                chunks = chunks[self._may_run(chunks)]
        self._plan_decode(builder, slots, wanted, crossing, guesses)
        if chunks.size:
            self._plan_prefill(builder, chunks.tolist())
        if self.waiting:
            self._admit(builder)
            self.drafts.beside_admissions(builder)
        if not builder.has_rows and not self.ledger.owes_a_launch:
            return None
        last_slots, _, last_samples = self.ledger.last_rows()
        plan = builder.build(last_slots, last_samples, *self._sampling())
        all_rows = slots.size + chunks.size + len(plan.admissions)
        # The plan has every row, and each is past its prompt.
        all_decode = 0 < all_rows == np.count_nonzero(plan.samples)
        if all_decode and not self.holdings.paused:
            self._steady = self.drafts.steady_decode(plan, self.pool.block_size)
        return self._planned(builder, plan)

    def _planned(self, builder: PlanBuilder, plan: LaunchPlan) -> Planned:
        """Return a plan that was made anew with the host's records of it. Its rows record the launch."""
        slots, epochs, samples = self.ledger.last_rows()
        rows, f_slots, crossed = self.rows, plan.rows.astype(np.intp), builder.crossed()
        rows.note_launch(f_slots, plan.number, plan.samples)
        return Planned(
            plan,
            slots,
            epochs,
            samples,
            row_epochs=rows.epoch[f_slots],
            events=self.tally.hand_over_events() if self.tally.events else NO_EVENTS,
            crossed_slots=crossed,
            crossed_epochs=rows.epoch[crossed] if crossed.size else NO_EPOCHS,
            prompt_logprob_ranges=prompt_logprob_ranges(plan, builder.prompts_owed, rows.epoch),
            sample_guesses=self.ledger.last_guesses,
        )

    def _sampling(self) -> tuple[int, bool, int, bool]:
        """Return the next S's rows, whether it needs the full form, its drafts, and whether it needs masks."""
        slots, _, samples = self.ledger.last_rows()
        if not self.ledger.owes_a_launch:
            return 0, False, 0, False
        full = np.count_nonzero(self.rows.needs_full.take(slots) & samples)
        masked = full and np.count_nonzero(self.rows.may_hold.take(slots) & samples)
        return slots.size, bool(full), self.ledger.last_drafts, bool(masked)

    def _builder(self, number: int, decoding: int = 0) -> PlanBuilder:
        limits = self.limits
        tokens, mixed = min(limits.max_prefill_tokens, self.ledger.prompt_room), limits.mixed_prefill_tokens
        if decoding and limits.mixed_graph_tokens:
            mixed = limits.mixed_tokens(decoding, self.prompt_tokens_wanted())
        piece = limits.piece_tokens if mixed < limits.mixed_prefill_tokens else 0
        return PlanBuilder(number, limits.plan_words, limits.bulk_words, tokens, mixed, piece)

    def _ration_blocks(self, crossing: NDArray[np.int64], wanted: NDArray[np.int64], chunks: NDArray[np.int64]) -> None:
        """Decide which rows pause for lack of blocks, and whether a row is evicted."""
        pool, holdings = self.pool, self.holdings
        slots = [*crossing.tolist(), *chunks.tolist()]
        blocks = (ceil_div(wanted, pool.block_size) - self.rows.num_blocks[crossing]).tolist()
        blocks += [self._chunk_blocks(slot) for slot in chunks.tolist()]
        shortage = None
        if sum(blocks) > pool.available:
            needs = [Need(holdings.request(slot), n) for slot, n in zip(slots, blocks, strict=True)]
            shortage = ration(needs, pool.available, order_of_service(holdings.callers.running()))
        waiting = shortage.waiting if shortage else ()
        for request in waiting:
            request.pauses += request.row_slot not in holdings.paused
        paused = frozenset(request.row_slot for request in waiting)
        self.tally.event("paused", len(paused - holdings.paused))
        self.tally.event("resumed", len(holdings.paused - paused))
        holdings.paused = paused
        if shortage is not None and shortage.missing > pool.fenced:
            victim = choose_victim(
                shortage, [r for r in holdings.requests() if self.rows.phase[r.row_slot] != _LEAVING]
            )
            if victim is not None:
                self.evict(victim)

    def _plan_decode(
        self,
        builder: PlanBuilder,
        slots: NDArray[np.int64],
        wanted: NDArray[np.int64],
        crossing: NDArray[np.bool_],
        guesses: int,
    ) -> None:
        """Plan all decoding rows, except those whose next blocks do not fit into the plan."""
        if np.count_nonzero(crossing):
            room = builder.appends_left(slots.size)
            self._reserve_crossed(builder, slots[crossing][:room], wanted[crossing][:room], slots.size)
            late = slots[crossing][room:]
            if late.size:
                stays = ~np.isin(slots, late)
                slots, wanted = slots[stays], wanted[stays]
        self.drafts.plan(slots, guesses)
        if slots.size:
            builder.decode(slots.astype(np.int32), self.drafts.most(slots, guesses), guesses)

    def _reserve_crossed(
        self, builder: PlanBuilder, slots: NDArray[np.int64], wanted: NDArray[np.int64], all_rows: int
    ) -> None:
        """Reserve blocks for rows that cross a block boundary with this launch. all_rows: number of decode rows in
        it."""
        rows = self.rows
        self.holdings.register(slots.tolist(), rows.last_launch[slots].tolist())
        counts = ceil_div(wanted, self.pool.block_size) - rows.num_blocks[slots]
        while np.count_nonzero(counts > 0):  # one pass, unless a launch may bring more tokens than a block holds
            crossing = slots[counts > 0]
            crossed, indexes = crossing.tolist(), rows.num_blocks[crossing].tolist()
            builder.cross(crossed, indexes, self.holdings.reserve_blocks(crossing))
            counts -= 1
            self.tally.counters["blocks_reserved"] += len(crossed)
        builder.append_snapshots(self.holdings.reserve_snapshots(slots.tolist(), builder.appends_left(all_rows)))

    def _may_run(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of these rows are neither paused nor leaving. [n]"""
        going: NDArray[np.bool_] = ~np.isin(slots, list(self.holdings.paused)) & (self.rows.phase[slots] != _LEAVING)
        return going

    def _plan_prefill(self, builder: PlanBuilder, slots: list[int]) -> None:
        """Plan the next chunk of each of these rows, in the order of service, until the budget is used up."""
        order = self.holdings.callers.in_order(slots)
        for index, slot in enumerate(order):
            if not self._plan_chunk(builder, slot):
                for late in order[index:]:
                    self.holdings.request(late).chunks_deferred += 1
                return

    def _cut(self, start: int, request: Request) -> int:
        """Return the end of a chunk that begins at `start`."""
        return self.holdings.shared.cut(start, request)

    def _chunk_blocks(self, slot: int) -> int:
        end = self._cut(int(self.rows.least_len[slot]), self.holdings.request(slot))
        return self.pool.blocks_for(end) - int(self.rows.num_blocks[slot])

    def _plan_chunk(self, builder: PlanBuilder, slot: int) -> bool:
        rows, request = self.rows, self.holdings.request(slot)
        start, have = int(rows.least_len[slot]), len(request.blocks)
        end = builder.piece(start, self._cut(start, request))
        blocks, again = self.pool.blocks_for(end) - have, self.holdings.shared.is_at_state(request, start)
        words = words_of(request, have, self.pool.block_size, self.limits) if again else 0
        if not builder.fits(end - start, blocks, words):
            return False  # not for lack of blocks: rows without their blocks are paused
        if again:
            self.holdings.shared.leave_state(request)
            builder.admit(begin_again(rows, request, self.pool.block_size, self.limits))
        builder.append_blocks(slot, have, self.holdings.allocate_blocks(request, blocks))
        last = end == request.tokens.size
        target = int(request.tokens[end]) if request.wants_prompt_logprobs and not last else NOT_A_TOKEN
        chunk = Chunk(slot, start, request.tokens[start:end], last, target)
        builder.chunk(chunk)
        if request.wants_prompt_logprobs:
            builder.prompts_owed.append((request, chunk))
        builder.append_snapshots(self.holdings.reserve_snapshots([slot], builder.appends_left(builder.rows)))
        rows.plan_chunk(slot, end, builder.number)
        if last:
            rows.enter(slot, RowPhase.DECODE)
        self.holdings.register([slot], [builder.number])
        self.tally.counters["prefill_chunks"] += 1
        self.tally.event("chunk")
        return True

    # ------------------------------------------------------------ admission

    def _admit(self, builder: PlanBuilder) -> None:
        """Admit waiting requests in queue order: each gets a row, its first blocks and its first chunk."""
        pool = self.pool
        for _ in range(self.limits.admissions):
            if (found := self.waiting.next_admission()) is None:
                return
            request, hit = found
            start = len(hit.blocks) * pool.block_size
            first = builder.piece(start, self._cut(start, request))
            words = words_of(request, len(hit.blocks), pool.block_size, self.limits)
            if not builder.fits(first - start, pool.blocks_for(first) - len(hit.blocks), words):
                return
            self.waiting.remove(request)
            self.holdings.allocate_row(request, hit)
            self.tally.admitted(request, start, searched=self.holdings.searches_prefix(request))
            builder.admit(begin_row(self.rows, request, pool.block_size, self.limits))
            if not self._plan_chunk(builder, request.row_slot):
                raise LedgerError("an admitted row's first chunk does not fit the plan that was measured for it")
