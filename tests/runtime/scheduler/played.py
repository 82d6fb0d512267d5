"""The scheduler and its ledger, played by hand: a device of a few Python lines brings one or more tokens a launch.

It knows of a row what the launches told it: how many tokens it has, whether it goes on. What it brings is a function of
the row and the place, and ends nothing but by length.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import HELD, STOPPED, VOID, cell_tag
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.plan import PLAN_WORDS, LaunchPlan, shape_of, stage
from runahead.runtime.scheduler.drafts import DraftChoice
from runahead.runtime.scheduler.ledger import Launch, Ledger
from runahead.runtime.scheduler.outcomes import Deferred
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.plan_builder import Planned, launch_of
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import RowPhase, Rows
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams

CONTEXT = 256
VOCAB = 97


def record_of(planned: Planned, *, first: bool = False) -> Launch:
    """The ledger's record of a plan that is staged somewhere for it, and launched alone."""
    body, bulk = np.zeros(1 << 12, np.int32), np.zeros(1 << 14, np.int32)
    stage(planned.plan, body, bulk)
    return launch_of(planned, shape_of(body), first=first, overlapped=False)


def token(handle: int, position: int) -> int:
    """What every device answers: never the end of a sequence."""
    return (7 * position + 13 * handle) % 90 + 5


@dataclass
class DeviceRow:
    """What the device knows of a row once all that was enqueued has run."""

    handle: int = 0
    length: int = 0
    known: int = 0
    max_len: int = 0
    alive: bool = False
    may_hold: bool = False


@dataclass
class Played:
    """drafts: tokens that a launch may bring of a row beside the one it samples, at most; draft_rows: of a launch that
    brings several, at most, and beside no chunk. choice: how many drafts each
    launch verifies; None: all of them. holds: how often S finds that what a row waits for, which waits, is not there.
    seed: of the dice that say so, and how many tokens a launch brings.
    """

    drafts: int = 0
    has_state: bool = False
    run_ahead: int = 2
    blocks: int = 40
    max_rows: int = 4
    plan_words: int = PLAN_WORDS
    seed: int = 0
    choice: DraftChoice | None = None
    holds: float = 0.0
    draft_rows: int = 0
    said: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ended: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = SchedulerLimits(
            CONTEXT, VOCAB, (1,), 16, 32, self.plan_words, 4096, drafts=self.drafts, has_state=self.has_state,
            draft_rows=self.draft_rows,
        )  # fmt: skip
        self.ledger: Ledger[Deferred] = Ledger(self.run_ahead, 512)
        rows, pool = Rows(self.max_rows, 8, CONTEXT), BlockPool(1 + self.blocks, 8)
        self.scheduler = Scheduler(limits, rows, pool, self.ledger, self.choice)
        self.device = [DeviceRow() for _ in range(self.max_rows)]
        self.plans: list[LaunchPlan] = []
        self.events: Counter[str] = Counter()  # of all plans
        self._cells: dict[int, tuple[NDArray[np.int64], NDArray[np.int8] | None]] = {}
        self._dice = random.Random(self.seed)

    def submit(self, handle: int, length: int, count: int, priority: int = 0, *, may_hold: bool = False) -> Request:
        prompt = np.full(length, handle + 2, np.int32)
        stopping = StoppingParams(count, ignore_eos=True)
        request = Request(
            1, handle, f"r{handle}", prompt, SamplingParams(), stopping, length + count, priority, may_hold=may_hold
        )
        self.scheduler.submit(request)
        return request

    # ------------------------------------------------------------ the chain

    def launch(self) -> bool:
        """Plan and enqueue a launch, and let the device run it. False if there is nothing to launch."""
        planned = self.scheduler.plan()
        if planned is None:
            return False
        plan, launch = planned.plan, record_of(planned)
        self.events.update(planned.events)
        self.ledger.enqueue(launch)
        self.plans.append(plan)
        self._cells[launch.number] = self._sampled(launch)
        self._applied(plan)
        self._check_plan(plan)
        return True

    def commit(self) -> None:
        """The oldest launch's tokens reach the host, and its F ends."""
        launch = self.ledger.next_to_commit()
        brought = self.scheduler.commits.commit(launch, *self._cells.pop(launch.number))
        for handle, found in zip(brought.handles.tolist(), brought.tokens.tolist(), strict=True):
            self.said[handle].append(found)
        self.ended += [ending.request.handle for ending in brought.endings]
        self.ledger.commit(launch.number)
        self.ledger.end(launch.number)
        self.ledger.retire()
        self.give_back()

    def give_back(self) -> bool:
        due = self.ledger.due()
        for resource in due:
            self.scheduler.release(resource)
        self.scheduler.holdings.make_some_findable()
        self.check()
        return bool(due)

    def turn(self) -> bool:
        """As the engine's loop does it. False if nothing is left to do."""
        while self.ledger.has_room and (self.launch() or self.give_back()):
            pass
        if not self.ledger.uncommitted:
            return False
        self.commit()
        return True

    def run(self) -> None:
        while self.turn():
            pass
        assert not self.scheduler.waiting
        assert not self.scheduler.holdings.requests()

    # ------------------------------------------------------------ the device

    def _sampled(self, launch: Launch) -> tuple[NDArray[np.int64], NDArray[np.int8] | None]:
        """The launch's cells, and how many drafts of each row it has looked at."""
        drafts = launch.shape.sample_drafts
        cells = np.full((launch.sample_slots.size, 1 + drafts), VOID, np.int64)
        drafted = np.zeros(launch.sample_slots.size, np.int8)
        for place in np.flatnonzero(launch.samples).tolist():
            row = self.device[launch.sample_slots[place]]
            if not row.alive:
                continue
            if row.may_hold and self._dice.random() < self.holds:
                cells[place, 0] = HELD
                self.events["held"] += 1
                continue
            # The first token after a prompt comes alone: nothing was drafted yet. So do those of a row that may wait.
            if row.length != row.known and not row.may_hold:
                drafted[place] = min(drafts, row.max_len - 1 - row.length)
            for offset in range(self._dice.randint(1, 1 + drafted[place])):
                cells[place, offset] = token(row.handle, row.length)
                row.length += 1
                row.alive = row.length < row.max_len
                cells[place, offset] |= 0 if row.alive else STOPPED
        return cells | cell_tag(launch.number), drafted if drafts else None

    def _applied(self, plan: LaunchPlan) -> None:
        for admission in plan.admissions:
            request = self.scheduler.holdings.by_slot[admission.slot]
            assert request is not None
            known = request.tokens.size
            self.device[admission.slot] = DeviceRow(request.handle, 0, known, request.max_len, True, request.may_hold)
        for chunk in plan.chunks:
            self.device[chunk.slot].length = chunk.start + chunk.tokens.size

    # ------------------------------------------------------------ what is so at any time

    def _check_plan(self, plan: LaunchPlan) -> None:
        """The host's bounds hold what the device has, and every query token of F has a block."""
        rows, size = self.scheduler.rows, self.scheduler.pool.block_size
        assert not set(plan.rows.tolist()) & self.scheduler.holdings.paused, "a paused row is in the plan"
        chunks = {chunk.slot for chunk in plan.chunks}
        if self.draft_rows and plan.drafts:
            assert not chunks and plan.rows.size <= self.draft_rows and plan.is_decode
            assert plan.tokens == plan.rows.size * (1 + plan.drafts)
        for slot in plan.rows.tolist():
            row = self.device[slot]
            if not row.alive:
                continue
            drafted = 0 if slot in chunks else plan.drafts
            assert rows.least_len[slot] <= row.length <= rows.most_len[slot]
            assert min(row.length + drafted, row.max_len - 1) <= rows.num_blocks[slot] * size
            if self.has_state:
                request = self.scheduler.holdings.by_slot[slot]
                assert request is not None
                assert request.state_slot >= 0

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.pool.check()
        scheduler.rows.check()
        scheduler.holdings.state_slots.check()
        leaving = int(np.count_nonzero(scheduler.rows.phase == RowPhase.LEAVING))
        assert scheduler.holdings.state_slots.owned == (
            len(scheduler.holdings.requests()) - leaving if self.has_state else 0
        )
