"""A whole engine in one process, on the simulated device with the hash model: what the tests of the chain drive."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runahead.cuda_graphs.device import Device
from runahead.cuda_graphs.rings import RingLayout, RingMemory, allocate_rings
from runahead.runtime.engine.links import RoundRobin
from runahead.runtime.engine.loop import Engine
from runahead.runtime.engine.poison import Poison
from runahead.runtime.memory.block_pool import NO_SLOT, BlockPool
from runahead.runtime.plan import APPEND_WORDS, CHUNK_WORDS, HEADER_WORDS, PLAN_WORDS
from runahead.runtime.scheduler.ledger import Launch, Ledger
from runahead.runtime.scheduler.outcomes import Deferred, Release
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import MAX_STOP_IDS, SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import prepared_submit
from tests.cuda_graphs.simulated_device import Schedule, SimulatedDevice, at_once
from tests.runtime.programs.hash_model import EOS, VOCAB
from tests.runtime.programs.hash_program import HashProgram

BULK_WORDS = 4096
EVERYTHING = 1 << 30  # work of a turn that reads all that was sent before it


def tightest_plan(max_rows: int, prefill_chunk: int, block_size: int) -> int:
    """Words of the smallest plan slot that settings may ask for: whatever else there is has to wait."""
    return HEADER_WORDS + max_rows + 2 + CHUNK_WORDS + APPEND_WORDS * (prefill_chunk // block_size)


def no_step() -> int:
    """The device does nothing until it is waited for: the host is always ahead."""
    return 0


def nobody_is_refused(owner: int, why: str) -> None:
    """For `SocketLinks` where every front end behaves."""
    raise AssertionError(f"front end {owner} was refused: {why}")


class MemoryLinks:
    """Front ends in memory: what each has said and nobody has taken, in order, and what all were sent.

    beats: how often the loop came round.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.sent: list[tuple[int, m.ToFrontEnd]] = []
        self._round_robin: RoundRobin[deque[m.ToEngine | None]] = RoundRobin()

    def tell(self, owner: int, message: m.ToEngine | None) -> None:
        """A front end says something. None: it is gone."""
        self._round_robin.lanes.setdefault(owner, deque()).append(message)

    @property
    def unread(self) -> list[tuple[int, m.ToEngine | None]]:
        """What was not taken yet, one front end after the other."""
        gone = [(owner, None) for owner in self._round_robin.gone]
        return [*gone, *((owner, message) for owner, lane in self._round_robin.lanes.items() for message in lane)]

    def receive(self) -> Iterator[tuple[int, m.ToEngine | None]]:
        return self._round_robin.take(self._next_of, bool)

    @property
    def has_more(self) -> bool:
        return bool(self._round_robin.gone) or any(self._round_robin.lanes.values())

    def _next_of(self, owner: int, lane: deque[m.ToEngine | None]) -> m.ToEngine | None:
        if not lane:
            return None
        message = lane.popleft()
        if message is None:
            self._round_robin.gone.append(owner)
            if not lane:
                del self._round_robin.lanes[owner]
        return message

    def send(self, owner: int, message: m.ToFrontEnd) -> None:
        self.sent.append((owner, message))

    def beat(self, now: float) -> None:
        self.beats += 1

    def wake_fds(self) -> Sequence[int]:
        return ()

    def wait(self, timeout_s: float) -> None:
        pass


class WatchedLedger(Ledger[Deferred]):
    """A ledger that writes down which blocks each launch names, while its rows still own them."""

    scheduler: Scheduler

    def __init__(self, run_ahead: int, run_ahead_tokens: int, launched: int = 0) -> None:
        super().__init__(run_ahead, run_ahead_tokens, launched)
        self._blocks: dict[int, set[int]] = {}

    def enqueue(self, launch: Launch) -> None:
        behind = self.uncommitted_prompt_tokens if launch.prompt_tokens and self.uncommitted else 0
        assert not behind or behind + launch.prompt_tokens <= self.run_ahead_tokens, "too long behind uncommitted ones"
        owners = [self.scheduler.holdings.by_slot[slot] for slot in launch.row_slots.tolist()]
        self._blocks[launch.number] = {block for request in owners if request for block in request.blocks}
        super().enqueue(launch)

    def retire(self) -> list[Launch]:
        gone = super().retire()
        for launch in gone:
            self._blocks.pop(launch.number)
        return gone

    def named(self) -> Iterator[tuple[int, set[int], set[int]]]:
        """Launches that have not retired, with the blocks and the row slots that they name.

        The one that is owed counts: its S will look at the last launch's rows.
        """
        for launch in self.launches():
            if launch.number > self.retired:
                sampled = launch.sample_slots[launch.samples].tolist()
                yield launch.number, self._blocks[launch.number], {*launch.row_slots.tolist(), *sampled}
        if self.owes_a_launch:
            slots, _, samples = self.last_rows()
            yield self.launched + 1, set(), set(slots[samples].tolist())


class WatchedPoison(Poison):
    """Poisons what is given back, once it is sure that no launch that has not retired names it."""

    ledger: WatchedLedger

    def release(self, resource: Release) -> None:
        for number, blocks, slots in self.ledger.named():
            assert not blocks & set(resource.blocks), f"launch {number} has not retired and names a block given back"
            assert resource.row_slot not in slots, f"launch {number} has not retired and names slot {resource.row_slot}"
        super().release(resource)


def tell_of_marks_one_by_one(device: Device) -> None:
    """From here on each look finds at most one more launch sampled.

    A host that is slow would find several at once, commit them together and queue the next ones only then: a row that
    ends with the last of them would waste nothing. So told, it does what a quick one does.
    """
    sampled = device.sampled
    told = sampled()

    def one_more() -> int:
        nonlocal told
        told = min(told + 1, sampled())
        return told

    device.sampled = one_more  # type: ignore[method-assign]


@dataclass
class Chain:
    """An engine and what it was told and said. Front ends are numbers, 1 where none is named."""

    engine: Engine
    device: SimulatedDevice
    links: MemoryLinks
    program: HashProgram
    ledger: WatchedLedger

    def submit(
        self,
        handle: int,
        prompt: Sequence[int],
        *,
        owner: int = 1,
        seed: int = 0,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        sampling: SamplingParams | None = None,
        announced: bool = False,
        structure: str = "",
        n: int = 1,
        **stopping: object,
    ) -> None:
        """Ask for a request; without an id of its own it is r<handle> from front end 1, r<owner>.<handle> from others.

        sampling: instead of `seed`. stopping: fields of StoppingParams.
        """
        limits = StoppingParams(**stopping)  # type: ignore[arg-type]
        name = request_id or (f"r{handle}" if owner == 1 else f"r{owner}.{handle}")
        self.tell(
            prepared_submit(
                handle,
                name,
                np.asarray(prompt, np.int32),
                sampling or SamplingParams(seed=seed),
                limits,
                block_size=self.engine.scheduler.pool.block_size,
                priority=priority,
                cache_salt=cache_salt,
                announced=announced,
                structure=structure,
                n=n,
            ),
            owner=owner,
        )

    def tell(self, message: m.ToEngine | None, *, owner: int = 1) -> None:
        """None: the front end is gone."""
        self.links.tell(owner, message)

    # ------------------------------------------------------------ the loop

    def turn(self) -> None:
        """One turn of the loop, and every invariant after it."""
        self.engine.turn()
        self.check()

    def check(self) -> None:
        """Conservation, and the rule of the fence: nothing that an unretired launch names is free."""
        scheduler, ledger = self.engine.scheduler, self.ledger
        scheduler.pool.check()
        scheduler.rows.check()
        scheduler.holdings.penalty_slots.check()
        scheduler.holdings.state_slots.check()
        scheduler.holdings.snapshots.check()
        owned = {block for request in scheduler.holdings.by_slot if request for block in request.blocks}
        assert len(owned) == scheduler.pool.owned
        own = [block for request in scheduler.holdings.by_slot if request for block in request.blocks[request.shared :]]
        assert len(own) == len(set(own)), "a block that was not found in the cache has two owners"
        free_blocks, free_slots = set(scheduler.pool._free), set(scheduler.rows._free)
        for number, blocks, slots in ledger.named():
            assert not blocks & free_blocks, f"launch {number} has not retired and names blocks that are free"
            assert not slots & free_slots, f"launch {number} has not retired and names row slots that are free"
        assert ledger.uncommitted <= max(1, ledger.run_ahead)
        assert ledger.in_flight <= self.device.rings.layout.slots

    @property
    def quiet(self) -> bool:
        """Nothing is left to do."""
        idle = not self.ledger.in_flight and not self.ledger.owes_a_launch
        return idle and not self.engine.intake.has_more and not len(self.engine.registry)

    def run(self, limit: int = 10_000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(limit):
            self.turn()
            if self.quiet:
                return
        raise AssertionError(f"no end after {limit} turns")

    def turn_until(self, reached: Callable[[], object], limit: int = 10_000) -> None:
        """Turn until something is so."""
        for _ in range(limit):
            if reached():
                return
            self.turn()
        raise AssertionError(f"not reached after {limit} turns")

    def check_nothing_is_left(self) -> None:
        """Every block and slot is free, or cached, and nothing is behind the fence."""
        stats, pool = self.engine.stats(), self.engine.scheduler.pool
        assert (pool.available, stats.rows_free) == (stats.blocks_total, stats.rows_total)
        assert stats.penalty_slots_free == stats.penalty_slots_total
        assert (self.ledger.fenced, stats.running, stats.waiting, stats.paused) == (0, 0, 0, 0)
        assert stats.preparing == 0
        assert stats.blocks_reserved == stats.blocks_adopted + stats.blocks_returned

    # ------------------------------------------------------------ what front ends were sent

    def slot_of(self, request_id: str) -> int:
        """Where a request lies. NO_SLOT while it waits."""
        tracked = self.engine.registry.by_id(request_id)
        assert tracked is not None, f"{request_id} is not being served"
        return tracked.request.row_slot

    def is_running(self, request_id: str) -> bool:
        tracked = self.engine.registry.by_id(request_id)
        return tracked is not None and tracked.request.row_slot != NO_SLOT

    def outputs(self, owner: int = 1) -> list[m.Output]:
        return [message for to, message in self.links.sent if to == owner and isinstance(message, m.Output)]

    def refused(self, owner: int = 1) -> list[m.Refused]:
        return [message for to, message in self.links.sent if to == owner and isinstance(message, m.Refused)]

    def tokens(self, owner: int = 1) -> dict[int, list[int]]:
        """Tokens by handle, in the order in which they came. None comes after its request's terminal."""
        found: dict[int, list[int]] = defaultdict(list)
        ended: set[int] = set()
        for output in self.outputs(owner):
            handles = np.frombuffer(output.handles, np.int64).tolist()
            for handle, token in zip(handles, np.frombuffer(output.tokens, np.int32).tolist(), strict=True):
                assert handle not in ended, f"a token for {handle} came after its terminal"
                found[handle].append(token)
            ended |= {end.handle for end in output.finished}
        return dict(found)

    def admitted(self, owner: int = 1) -> dict[int, m.Admitted]:
        """What was said of each request when it was first given a row: once, before anything else of it."""
        found: dict[int, m.Admitted] = {}
        for to, message in self.links.sent:
            if to == owner and isinstance(message, m.Admitted):
                assert message.handle not in found, f"{message.handle} was said to be admitted twice"
                found[message.handle] = message
        return found

    def finished(self, owner: int = 1) -> dict[int, list[m.Finished]]:
        """Terminals by handle: exactly one each, if all is well."""
        found: dict[int, list[m.Finished]] = defaultdict(list)
        for output in self.outputs(owner):
            for end in output.finished:
                found[end.handle].append(end)
        return dict(found)


def _rings(slots: int, plan_words: int, max_rows: int, prompt_tokens: int, drafts: int) -> RingMemory:
    entries = max_rows * (1 + drafts) + prompt_tokens
    return allocate_rings(RingLayout(slots, plan_words, BULK_WORDS, max_rows, 4, drafts=drafts, prompt_tokens=entries))


def make_chain(
    run_ahead: int = 2,
    *,
    schedule: Schedule = at_once,
    max_rows: int = 8,
    num_blocks: int = 65,
    block_size: int = 8,
    context_length: int = 128,
    prefill_chunk: int = 16,
    max_prefill_tokens: int = 32,
    run_ahead_tokens: int = 512,
    max_queue: int = 100,
    eos: tuple[int, ...] = (EOS,),
    clock: Callable[[], float] | None = None,
    program_type: type[HashProgram] = HashProgram,
    device_type: type[SimulatedDevice] = SimulatedDevice,
    ring_slots: int | None = None,
    plan_words: int = PLAN_WORDS,
    penalty_slots: int = 0,
    prefix_cache: bool = True,
    counters_from: int = 0,
    admissions: int = 512,
    drafts: int = 0,
    forced_drafts: int = 0,
    mixed_prefill_tokens: int = sys.maxsize,
    **engine_options: Any,
) -> Chain:
    """A chain of the given depth; 0 is serial.

    ring_slots: run_ahead + 2 unless a test wants too few. counters_from: launches and epochs begin after this number.
    admissions: rows that may begin with one launch. drafts, forced_drafts: of a row, and of one with a grammar.
    mixed_prefill_tokens: see `SchedulerLimits`.
    engine_options: more of those of `Engine`.
    """
    rings = _rings(ring_slots or run_ahead + 2, plan_words, max_rows, max_prefill_tokens, max(drafts, forced_drafts))
    program = program_type(
        rings,
        max_rows=max_rows,
        num_blocks=num_blocks,
        block_size=block_size,
        context_length=context_length,
        vocab_size=VOCAB,
        penalty_slots=penalty_slots,
        launched=counters_from,
    )
    device = device_type(program, rings, schedule, launched=counters_from)
    limits = SchedulerLimits(
        context_length, VOCAB, eos, prefill_chunk, max_prefill_tokens, plan_words, BULK_WORDS,
        penalty_slots=penalty_slots,
        prefix_cache=prefix_cache,
        drafts=drafts,
        forced_drafts=forced_drafts,
        history=drafts > 0,
        admissions=admissions,
        mixed_prefill_tokens=mixed_prefill_tokens,
    )  # fmt: skip
    ledger = WatchedLedger(run_ahead, run_ahead_tokens, counters_from)
    rows = Rows(max_rows, MAX_STOP_IDS, context_length, epoch=counters_from)
    scheduler = Scheduler(limits, rows, BlockPool(num_blocks, block_size), ledger)
    poison = WatchedPoison(program, rings)
    ledger.scheduler, poison.ledger = scheduler, ledger
    links = MemoryLinks()
    if clock is not None:
        engine_options["clock"] = clock
    engine_options.setdefault("turn_work", EVERYTHING)
    engine = Engine(device, scheduler, links, max_queue=max_queue, poison=poison, **engine_options)
    return Chain(engine, device, links, program, ledger)
