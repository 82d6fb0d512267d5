"""What must hold after every step, each by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from runahead.runtime.programs.cpu.inputs import slot_of_snapshot
from runahead.runtime.scheduler.request import MAX_EVICTIONS, Request
from runahead.runtime.scheduler.rows import RowPhase
from tests.simulation.assembly import SimulatedChain
from tests.simulation.oracle import STATE_INIT, next_state
from tests.simulation.policy import blocks_needed
from tests.simulation.programs import NOT_FINITE, StateProgram


def conservation(chain: SimulatedChain) -> None:
    """Every block, row slot, penalty slot and state slot is in one place, and every staging slot in one launch."""
    scheduler, ledger = chain.engine.scheduler, chain.ledger
    scheduler.pool.check()
    scheduler.rows.check()
    scheduler.holdings.penalty_slots.check()
    scheduler.holdings.state_slots.check()
    scheduler.holdings.snapshots.check()
    staged = [chain.device.rings.slot(launch.number) for launch in ledger.launches()]
    assert len(staged) == len(set(staged)) <= chain.device.rings.layout.slots, "two launches hold one staging slot"
    live = [request for request in scheduler.holdings.by_slot if request]
    rows = scheduler.rows
    running = int(np.count_nonzero((rows.phase != RowPhase.FREE) & (rows.phase != RowPhase.FENCED)))
    assert len(live) == running, "rows and requests do not agree"
    assert scheduler.holdings.penalty_slots.owned == sum(request.penalty_slot >= 0 for request in live)
    slots = scheduler.holdings.state_slots
    assert slots.owned == sum(0 <= request.state_slot < slots.total for request in live)
    ahead = [one for request in live for one in scheduler.holdings._snapshots_ahead(request)]
    assert scheduler.holdings.snapshots.owned == len(ahead) == len(set(ahead)), "a snapshot has no owner, or two"


def one_owner(chain: SimulatedChain) -> None:
    """No block has two owners, but for those that were found in the prefix cache."""
    live = [request for request in chain.engine.scheduler.holdings.by_slot if request]
    own = [block for request in live for block in request.blocks[request.shared :]]
    assert len(own) == len(set(own)), "a block that was not found in the cache has two owners"
    shared = {block for request in live for block in request.blocks[: request.shared]}
    assert len(shared | set(own)) == chain.pool.owned, "what is owned is not what rows hold"
    for request in live:
        assert len(request.blocks) == len(set(request.blocks)), "a row holds a block twice"
        held = chain.engine.scheduler.rows.num_blocks[request.row_slot]
        assert not request.blocks or len(request.blocks) == held, "a row's blocks are not as many as it counts"
    for name in ("row_slot", "penalty_slot", "state_slot"):
        slots = [getattr(request, name) for request in live if getattr(request, name) >= 0]
        assert len(slots) == len(set(slots)), f"a {name} has two owners"


def fence(chain: SimulatedChain) -> None:
    """Nothing that a launch names is free before it has retired."""
    scheduler, ledger = chain.engine.scheduler, chain.ledger
    for number, blocks, slots in ledger.named():
        assert not blocks & set(scheduler.pool._free), f"launch {number} names blocks that are free"
        assert not blocks & set(scheduler.pool._cached), f"launch {number} names cached blocks that nobody holds"
        assert not slots & set(scheduler.rows._free), f"launch {number} names row slots that are free"
    for number, penalty_slots, state_slots in ledger.slots_named():
        assert not penalty_slots & set(scheduler.holdings.penalty_slots._free), (
            f"launch {number} names free penalty slots"
        )
        assert not state_slots & set(scheduler.holdings.state_slots._free), f"launch {number} names free state slots"
    pool = scheduler.holdings.snapshots
    for number, snapshots in ledger.snapshots_named():
        assert not snapshots & {*pool._free, *pool._cached}, f"launch {number} names snapshots that may be given out"


def bounds(chain: SimulatedChain) -> None:
    """Queue, ledger, rings and rows stay within their limits."""
    scheduler, ledger = chain.engine.scheduler, chain.ledger
    max_queue = chain.engine.intake._max_queue
    assert len(scheduler.waiting) <= max_queue + scheduler.rows.free, "the queue is longer than it may be"
    assert ledger.uncommitted <= max(1, ledger.run_ahead), "the ledger is deeper than run_ahead"
    assert ledger.in_flight <= chain.device.rings.layout.slots, "more launches are in flight than rings have slots"
    rows, limits = scheduler.rows, scheduler.limits
    for request in scheduler.holdings.by_slot:
        if request is not None:
            slot = request.row_slot
            known, longest = int(rows.committed_len[slot]), int(rows.max_len[slot])
            assert known <= longest, "a row has more tokens than it may"
            spread = int(rows.most_len[slot] - rows.least_len[slot])
            drafts = 1 + limits.forced_drafts if request.may_hold else limits.drafts  # one that is held brings no token
            assert 0 <= spread <= drafts * ledger.uncommitted, "the bounds of a row's length are too far apart"
            # With drafts a launch is planned while the row may go on, and so past the end of one that came far.
            assert drafts or rows.least_len[slot] < longest, "a row is planned past its end"
            most = scheduler.holdings.blocks_at_most(request)
            assert len(request.blocks) <= most, "a row holds blocks that it can't need"


def ranks(chain: SimulatedChain) -> None:
    """Who waits is sorted by priority and arrival among its caller's requests, and no paused row is gone."""
    scheduler = chain.engine.scheduler
    waiting = list(scheduler.waiting)
    known = len(set(waiting)) + scheduler.waiting.for_prompts
    assert len(waiting) + scheduler.waiting.for_prompts == known == len(scheduler.waiting), (
        "a request waits twice, or nowhere"
    )
    for caller in {request.caller for request in waiting}:
        own = [request.queue_order for request in waiting if request.caller == caller]
        assert own == sorted(own), "the queue is not in order"
    for slot in scheduler.holdings.paused:
        assert scheduler.holdings.by_slot[slot] is not None, "a paused row has no request"


def findable(chain: SimulatedChain) -> None:
    """A block in the prefix cache is full of committed tokens: those that its own device cache holds."""
    cache = chain.program.cache
    for block, content in chain.pool._contents.items():
        tokens = np.frombuffer(content.tokens, np.int32)
        assert np.array_equal(cache[block], tokens), f"block {block} does not hold what it is found by"
    if isinstance(chain.program, StateProgram):
        _snapshots_are_what_they_are_found_by(chain, chain.program)


def _snapshots_are_what_they_are_found_by(chain: SimulatedChain, program: StateProgram) -> None:
    """A snapshot in the prefix cache is the state behind the tokens of the block that it is found by, at a border."""
    scheduler = chain.engine.scheduler
    for snapshot, content in scheduler.holdings.snapshots._contents.items():
        place = slot_of_snapshot(program.rows, snapshot)
        seen, state = program.seen[place], STATE_INIT
        for token in seen:
            state = next_state(state, token)
        assert NOT_FINITE not in seen, f"snapshot {snapshot} is of a row that was not finite"
        assert state == program.states[place], f"snapshot {snapshot} was written over"
        assert seen and not len(seen) % chain.pool.block_size, f"snapshot {snapshot} is of no border"
        tokens = np.frombuffer(content.tokens, np.int32).tolist()
        assert list(seen[-len(tokens) :]) == tokens, f"snapshot {snapshot} is not of what it is found by"


def counts_of_the_queue(chain: SimulatedChain) -> None:
    """What admission keeps from turn to turn, counted again from scratch: the blocks that running rows lack, and the
    available blocks of the prefix of the request that is next."""
    scheduler = chain.engine.scheduler
    counted, right = scheduler.waiting._needed_by_rows(), blocks_needed(scheduler)
    assert counted == right, f"running rows are said to lack {counted} blocks, soon and at most, and lack {right}"
    walk = scheduler.waiting._walk
    if walk is not None:
        hit = walk.hit
        unowned = sum(block in scheduler.pool._cached for block in hit.blocks)
        assert hit.unowned == unowned, f"{hit.unowned} blocks of a prefix are said to be available, and {unowned} are"


def forced_runs(chain: SimulatedChain) -> None:
    """Grammars alone force tokens: on the device no row without one has a forced run."""
    rows = chain.program.rows
    assert not np.count_nonzero(rows.forced & rows.alive & (rows.mask_epoch == 0)), "a row without a grammar is forced"


INVARIANTS: Final[tuple[Callable[[SimulatedChain], None], ...]] = (
    conservation,
    one_owner,
    fence,
    bounds,
    ranks,
    findable,
    counts_of_the_queue,
    forced_runs,
)


class Staged:
    """The plan of a launch stays as it was staged until the launch has retired."""

    def __init__(self) -> None:
        self._plans: dict[int, bytes] = {}

    def look(self, chain: SimulatedChain) -> None:
        rings = chain.device.rings
        alive = {launch.number for launch in chain.ledger.launches()}
        self._plans = {number: plan for number, plan in self._plans.items() if number in alive}
        for number in alive:
            plan = rings.plan[rings.slot(number)].tobytes()
            assert self._plans.setdefault(number, plan) == plan, f"the plan of launch {number} was written over"


class Progress:
    """Where work exists, something is done for a request within a bounded number of turns.

    What counts: a token, a chunk, a request that comes, gets a row or ends, and an order that the mask worker carries
    out. Every turn with work commits a launch, or
    retires one where all are committed. Say that nothing counts from some turn on. The launches in flight, run_ahead
    + 1 with the owed one, may all be void. Then what they held is free, and a row goes on, or one is evicted, whose own
    launches are as many again. Then a row goes on or is admitted: in the next launch, whose token the one after
    brings. A turn in which the device was waited for in vain counts for nothing.
    `longest` is what was seen.
    """

    def __init__(self, run_ahead: int) -> None:
        self.bound = 2 * (run_ahead + 1) + 3
        self.longest = 0
        self._stalled = 0
        self._done: tuple[int, ...] = ()
        self._rests = 0

    def look(self, chain: SimulatedChain) -> None:
        scheduler = chain.engine.scheduler
        counters = scheduler.tally.counters
        done = (
            *(counters[kind] for kind in ("generated_tokens", "prefill_chunks", "submitted", "admitted")),
            chain.masks.handled if chain.masks else 0,
            sum(scheduler.tally.finished.values()),
        )
        rests = chain.device.rests + (chain.masks.rests if chain.masks else 0)
        rested, self._rests = rests > self._rests, rests
        if done != self._done or not len(chain.engine.registry):
            self._stalled = 0
        elif not rested:
            self._stalled += 1
        self._done = done
        self.longest = max(self.longest, self._stalled)
        assert self._stalled <= self.bound, f"nothing was done for anybody in {self._stalled} turns"


class Evictions:
    """No request is told to leave more than MAX_EVICTIONS times, unless a row of a higher precedence is there,
    or a caller without a row.

    It is looked at when a row is told to leave: one that takes its blocks may have come, and may go, in the same turn.
    """

    def __init__(self, chain: SimulatedChain) -> None:
        self._broken = ""
        self._scheduler = scheduler = chain.engine.scheduler
        self._evict = scheduler.evict
        scheduler.evict = self._watched  # type: ignore[method-assign]

    def _watched(self, request: Request) -> None:
        scheduler = self._scheduler
        others = [
            other.precedence
            for other in scheduler.holdings.requests()
            if other is not request and scheduler.rows.phase[other.row_slot] != RowPhase.LEAVING
        ]
        is_outranked = max(others, default=request.precedence) > request.precedence
        if request.evictions >= MAX_EVICTIONS and not is_outranked and not request.gives_way:
            times = request.evictions + 1
            self._broken = f"{request.request_id} was evicted {times} times, by nobody of a higher precedence"
        self._evict(request)

    def look(self, chain: SimulatedChain) -> None:
        assert not self._broken, self._broken


class Hanging:
    """The watchdog stops the engine when launches were in flight without a mark for longer than it allows, not sooner,
    and not later than the next look: a turn and the waits in it.

    The last marks before a device hangs may bring nobody anything. Then the engine first sees that no request comes
    further.
    """

    def __init__(self, limit_s: float, turn_s: float) -> None:
        self._limit_s = limit_s
        self._look_s = turn_s + 0.5
        self._marks = (-1, -1)
        self._since = 0.0
        self._work = (-1, -1)
        self._worked = 0.0

    def look(self, chain: SimulatedChain) -> None:
        marks = (chain.ledger.committed, chain.ledger.ended)
        if marks != self._marks or not chain.ledger.in_flight:
            self._marks, self._since = marks, chain.clock.now
        counters = chain.engine.scheduler.tally.counters
        work = (counters["generated_tokens"], counters["prefill_chunks"])
        if work != self._work or not len(chain.engine.registry):
            self._work, self._worked = work, chain.clock.now
        hanging_s = chain.clock.now - self._since
        assert hanging_s <= self._limit_s + self._look_s, f"launches hang for {hanging_s:g} s, and nobody has noticed"

    def stopped(self, chain: SimulatedChain, is_hung: bool) -> None:
        """By the watchdog: a launch hung, or requests came no further. It has looked within a turn, as nobody else."""
        waited_s = chain.clock.now - (self._since if is_hung else self._worked)
        assert waited_s > self._limit_s - self._look_s, f"the watchdog waited {waited_s:g} s, not {self._limit_s:g}"
