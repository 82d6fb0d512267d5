"""An engine as a script asks for it, on the simulated device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from runahead.cuda_graphs.rings import RingLayout, RingMemory
from runahead.runtime.engine.figures import Snapshot
from runahead.runtime.engine.loop import Engine
from runahead.runtime.memory.block_pool import NO_SLOT, BlockPool
from runahead.runtime.memory.prefix_cache import NO_SNAPSHOT
from runahead.runtime.plan import CHUNK_ROW, read_plan
from runahead.runtime.scheduler.ledger import Launch
from runahead.runtime.scheduler.outcomes import Release
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import MAX_STOP_IDS
from tests.cuda_graphs.simulated_device import at_once, seeded_schedule
from tests.runtime.chain import BULK_WORDS, EVERYTHING, Chain, MemoryLinks, WatchedLedger, WatchedPoison
from tests.runtime.late_masks import LateMasks
from tests.runtime.programs.hash_model import EOS, VOCAB
from tests.simulation.clock import Clock
from tests.simulation.drafts import ChangingChoice, DraftProgram, ToldDrafter
from tests.simulation.oracle import answer
from tests.simulation.policy import HeldToItsWord
from tests.simulation.programs import Sickness, SimulatedProgram, StateProgram
from tests.simulation.ranks import FirstDevice, Ranks
from tests.simulation.script import DRAFTS, GRAMMARS, STATES, Mode, Script
from tests.simulation.shapes import check_shape

MAX_TOP: Final = 4
_PROGRAMS: Final[dict[Mode, type[SimulatedProgram]]] = {
    Mode.PLAIN: SimulatedProgram,
    Mode.DRAFTS: DraftProgram,
    Mode.STATE: StateProgram,
    Mode.STATE_DRAFTS: StateProgram,
    Mode.MASKS: SimulatedProgram,
}


class NamingLedger(WatchedLedger):
    """Writes down which penalty slots and state slots each launch names, too, and looks at each launch's shape."""

    rings: RingMemory
    scheduler: HeldToItsWord

    def __init__(self, run_ahead: int, run_ahead_tokens: int, launched: int = 0) -> None:
        super().__init__(run_ahead, run_ahead_tokens, launched)
        self._penalty_slots: dict[int, dict[int, int]] = {launched: {}}  # of a launch's rows, by row slot
        self._state_slots: dict[int, set[int]] = {}
        self._snapshots: dict[int, set[int]] = {}
        self._begun: dict[int, tuple[int, int]] = {}  # by row slot whose first launch was seen: epoch, and as what
        self.forms = Counter[str]()  # launches, by what `check_shape` says of them

    def enqueue(self, launch: Launch) -> None:
        self.forms[check_shape(launch, self.rings, self.scheduler)] += 1
        rows = [(slot, self.scheduler.holdings.by_slot[slot]) for slot in launch.row_slots.tolist()]
        self._penalty_slots[launch.number] = {slot: row.penalty_slot for slot, row in rows if row}
        self._state_slots[launch.number] = {row.state_slot for _, row in rows if row}
        places = read_plan(self.rings.plan[self.rings.slot(launch.number)]).chunks[:, CHUNK_ROW]
        chunks = set(launch.row_slots[places].tolist())
        self._snapshots[launch.number] = {
            one for slot, row in rows if row for one in self._named_of(slot, row, slot in chunks)
        }
        super().enqueue(launch)

    def _named_of(self, slot: int, request: Request, has_chunk: bool) -> Iterator[int]:
        """Snapshots of a row that the launch reads or may write: where the row may be held, or has drafts, its length
        is not known."""
        scheduler = self.scheduler
        rows, every = scheduler.rows, scheduler.limits.snapshot_tokens if scheduler.limits.snapshots else 0
        if self._begun.get(slot) != (begun := (int(rows.epoch[slot]), request.begins_as)):
            self._begun[slot] = begun
            yield request.begins_as
        if request.state_slot >= rows.max_rows:  # its state is in a snapshot
            yield request.state_slot - rows.max_rows + 1
        if every:
            given_up = request.registered * scheduler.pool.block_size
            if has_chunk:  # it may end at a border, whose snapshot the row has given up with this very launch
                given_up = int(rows.state_len[slot]) - 1
            yield from request.snapshots[given_up // every : int(rows.most_len[slot]) // every]

    def snapshots_named(self) -> Iterator[tuple[int, set[int]]]:
        """Launches that have not retired, with the snapshots that they name."""
        for launch in self.launches():
            if launch.number > self.retired:
                yield launch.number, self._snapshots[launch.number] - {NO_SNAPSHOT}

    def slots_named(self) -> Iterator[tuple[int, set[int], set[int]]]:
        """Launches that have not retired, the owed one too, with the penalty slots and the state slots they name.

        S reads the penalty slots of the rows that it samples; F those of its own, for drafts, and its state slots.
        """
        for launch in self.launches():
            if launch.number > self.retired:
                sampled = self._sampled(launch.number, launch.sample_slots[launch.samples].tolist())
                mine = {*self._penalty_slots[launch.number].values()}
                yield launch.number, (sampled | mine) - {NO_SLOT}, self._state_slots[launch.number] - {NO_SLOT}
        if self.owes_a_launch:
            slots, _, samples = self.last_rows()
            yield self.launched + 1, self._sampled(self.launched + 1, slots[samples].tolist()) - {NO_SLOT}, set()

    def _sampled(self, number: int, slots: Sequence[int]) -> set[int]:
        before = self._penalty_slots[number - 1]
        return {before[slot] for slot in slots}


class SlotPoison(WatchedPoison):
    """Poisons penalty slots, state slots and snapshots once it is sure that no launch that has not retired names
    them."""

    def release(self, resource: Release) -> None:
        assert isinstance(self.ledger, NamingLedger) and isinstance(resource, Release)
        for number, penalty_slots, state_slots in self.ledger.slots_named():
            assert resource.penalty_slot not in penalty_slots, (
                f"launch {number} has not retired and names penalty slot {resource.penalty_slot}, given back"
            )
            assert resource.state_slot not in state_slots, (
                f"launch {number} has not retired and names state slot {resource.state_slot}, given back"
            )
        for number, snapshots in self.ledger.snapshots_named():
            assert not snapshots & set(resource.snapshots), (
                f"launch {number} has not retired and names a snapshot of {resource.snapshots}, given back"
            )
        super().release(resource)


class CountingPool(BlockPool):
    """reused: cached blocks given out for want of free ones. revived: blocks found while a launch in flight still named
    them for somebody who had given them up. shared: blocks found while somebody else held them."""

    reused = 0
    revived = 0
    shared = 0

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.shared += self._ref_counts.one[block] > 0
            self.revived += not self._ref_counts.one[block] and self._fences.one[block] > 0
        super().share(blocks)

    def allocate(self, count: int) -> list[int]:
        self.reused += max(0, min(count, self.available) - self.free)
        return super().allocate(count)


class WatchedLinks(MemoryLinks):
    """Writes down what the engine takes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: list[tuple[int, m.ToEngine | None]] = []

    def receive(self) -> Iterator[tuple[int, m.ToEngine | None]]:
        for one in super().receive():
            self._taken.append(one)
            yield one

    def take_taken(self) -> list[tuple[int, m.ToEngine | None]]:
        """What was taken since the last call."""
        taken, self._taken = self._taken, []
        return taken


@dataclass
class SimulatedChain(Chain):
    """snapshots: those that were logged. clock: the engine's. masks: of rows with a grammar; None: no row has one.
    ranks: that run each launch."""

    device: FirstDevice
    links: WatchedLinks
    ledger: NamingLedger
    pool: CountingPool
    snapshots: list[Snapshot]
    clock: Clock
    masks: LateMasks | None
    ranks: Ranks


def make_chain(script: Script, depth: int, counters_from: int = 0, num_ranks: int = 1) -> SimulatedChain:
    """The engine of `script`, `depth` launches ahead; 0 is serial. Launches and epochs begin after `counters_from`.
    num_ranks: that run each launch; several are for scripts without pauses."""
    world = script.world
    drafts = DRAFTS if world.mode in (Mode.DRAFTS, Mode.STATE_DRAFTS) else 0
    forced = DRAFTS if world.mode in GRAMMARS else 0
    has_masks = world.mode in GRAMMARS or any(ask.grammar for ask in script.asks)
    masks = LateMasks(world.max_rows, script.seed * 8 + depth, forced) if has_masks else None
    tokens = world.max_prefill_tokens + world.max_rows * (1 + drafts + forced)
    rings_layout = RingLayout(
        slots=depth + 2 + world.extra_slots, plan_words=world.plan_words, bulk_words=BULK_WORDS,
        rows=world.max_rows, max_top=MAX_TOP, drafts=max(drafts, forced), prompt_tokens=tokens,
    )  # fmt: skip
    ranks = Ranks(num_ranks, rings_layout, script.seed, counters_from)
    rings = ranks.rings
    sizes: dict[str, Any] = {
        "max_rows": world.max_rows,
        "num_blocks": world.num_blocks,
        "block_size": world.block_size,
        "context_length": world.context_length,
        "vocab_size": VOCAB,
        "penalty_slots": world.penalty_slots,
        "launched": counters_from,
    }
    if masks is not None:
        sizes["masks"] = masks.memory
    if world.mode is Mode.STATE_DRAFTS:
        answers = {ask.seed: (*ask.prompt, *answer(ask, world).tokens) for ask in script.asks}
        sizes["drafter"] = drafter = ToldDrafter(answers)
    if world.mode in STATES:
        sizes |= {"snapshots": world.snapshots, "snapshot_tokens": world.snapshot_blocks * world.block_size}
    sickness = {ask.seed: Sickness(ask.sick_logits, ask.sick_hidden) for ask in script.asks if ask.is_sick}
    make: Callable[[RingMemory], SimulatedProgram] = partial(_PROGRAMS[world.mode], sickness=sickness, **sizes)
    program = make(rings)
    if world.mode is Mode.STATE_DRAFTS:
        drafter.rows = program.rows
    schedule = at_once if world.device_seed < 0 else seeded_schedule(world.device_seed)
    clock = Clock()
    device = FirstDevice(
        program, rings, schedule, clock, pause_s=world.pause_s, seed=script.seed, launched=counters_from
    )
    limits = SchedulerLimits(
        world.context_length, VOCAB, (EOS,), world.prefill_chunk, world.max_prefill_tokens, world.plan_words,
        BULK_WORDS, penalty_slots=world.penalty_slots, prefix_cache=world.prefix_cache, drafts=drafts,
        draft_rows=world.draft_rows,
        forced_drafts=forced, forced_rows=2 + script.seed // 5 % 2 * 6, has_state=world.mode in STATES,
        snapshots=world.snapshots, snapshot_tokens=world.snapshot_blocks * world.block_size,
        patience_s=world.patience_s, mixed_prefill_tokens=world.mixed_prefill_tokens,
        mixed_graph_tokens=world.mixed_graph_tokens, piece_tokens=world.block_size,
    )  # fmt: skip
    ledger = NamingLedger(depth, world.run_ahead_tokens, counters_from)
    pool = CountingPool(world.num_blocks, world.block_size)
    rows = Rows(world.max_rows, MAX_STOP_IDS, world.context_length, epoch=counters_from)
    choice = ChangingChoice(script.seed) if drafts else None
    scheduler = HeldToItsWord(limits, rows, pool, ledger, choice)
    counters = scheduler.tally.counters
    device.work = lambda: counters["generated_tokens"] + counters["prefill_chunks"]
    engine_device = ranks.join(device, program, make)
    poison = SlotPoison(ranks.poisoned(program), rings)
    ledger.scheduler, ledger.rings, poison.ledger = scheduler, rings, ledger
    links = WatchedLinks()
    snapshots: list[Snapshot] = []
    engine = Engine(
        engine_device, scheduler, links, max_queue=world.max_queue, poison=poison, log_interval=world.log_interval,
        log_mode=world.log_mode, write_snapshot=snapshots.append, clock=clock,
        turn_work=world.turn_work or EVERYTHING,
        launch_timeout_s=world.launch_timeout_s, masks=masks,
    )  # fmt: skip
    return SimulatedChain(engine, device, links, program, ledger, pool, snapshots, clock, masks, ranks)
