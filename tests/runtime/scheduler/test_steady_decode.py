"""What a launch takes over from the one before is what would have been made anew."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest

from runahead.cuda_graphs.device import LaunchShape
from runahead.runtime.plan import HEADER, HEADER_WORDS, LaunchPlan, read_plan
from runahead.runtime.scheduler.ledger import Launch
from runahead.runtime.scheduler.plan_builder import NO_APPENDS
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.scheduler.steady_decode import SteadyDecode
from runahead.runtime.wire import messages as m
from tests.runtime.chain import Chain, make_chain
from tests.runtime.lifecycles import OWNERS, Lifecycle
from tests.runtime.programs.hash_model import completion
from tests.runtime.scheduler.taken_over import TakenOver, nothing_is_taken_over

SEEDS = range(40)


class Recorder:
    """Everything that an engine says of its launches.

    plans, bulks: the words of both slots as they are staged, as many as are used. records: the ledger's.
    """

    def __init__(self, chain: Chain) -> None:
        self.plans: list[list[int]] = []
        self.bulks: list[list[int]] = []
        self.records: list[list[Any]] = []
        launch, enqueue, rings = chain.device.launch, chain.ledger.enqueue, chain.device.rings

        def staged(shape: LaunchShape) -> None:
            slot = rings.slot(shape.number)
            view = read_plan(rings.plan[slot])
            self.plans.append(rings.plan[slot, : view.words].tolist())
            self.bulks.append(rings.bulk[slot, : view.bulk_words].tolist())
            launch(shape)

        def recorded(record: Launch) -> None:
            parts = [
                (part.request.request_id, part.epoch, part.row_slot, part.start, part.first_entry, part.count)
                for part in record.prompt_logprob_ranges
            ]
            columns = record._replace(prompt_logprob_ranges=())
            self.records.append([*(one.tolist() if isinstance(one, np.ndarray) else one for one in columns), parts])
            enqueue(record)

        chain.device.launch = staged  # type: ignore[method-assign]
        chain.ledger.enqueue = recorded  # type: ignore[method-assign, assignment]

    def check_same(self, other: Recorder) -> None:
        """Every word that was staged, and every record."""
        assert self.plans == other.plans
        assert self.bulks == other.bulks
        assert self.records == other.records


def check_same_truth(mine: Scheduler, other: Scheduler) -> None:
    """The host's columns, counters and prefix cache."""
    for column in ("history", "committed_len", "planned", "epoch", "phase", "num_blocks"):
        assert np.array_equal(getattr(mine.rows, column), getattr(other.rows, column)), column
    assert mine.tally.counters == other.tally.counters
    assert mine.pool._contents == other.pool._contents


@cache
def life_of(seed: int, anew: bool) -> tuple[Lifecycle, Recorder, Counter[str]]:
    life = Lifecycle(seed)
    recorder, taken_over = Recorder(life.chain), TakenOver(life.chain.engine.scheduler)
    if anew:
        nothing_is_taken_over(life.chain.engine.scheduler)
    life.live()
    life.check_answers()
    return life, recorder, taken_over.seen


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_that_continues_the_one_before_is_the_plan_that_would_be_made_anew(seed: int) -> None:
    (_, quick, _), (_, anew, never) = life_of(seed, anew=False), life_of(seed, anew=True)
    quick.check_same(anew)
    assert not never


@pytest.mark.parametrize("seed", SEEDS)
def test_commits_that_take_over_what_is_the_same_leave_the_hosts_truth_as_it_would_be(seed: int) -> None:
    (quick, _, _), (anew, _, _) = life_of(seed, anew=False), life_of(seed, anew=True)
    for owner in OWNERS:
        outputs = [
            [(output.launch, output.handles, output.tokens, output.logprobs) for output in life.chain.outputs(owner)]
            for life in (quick, anew)
        ]
        assert outputs[0] == outputs[1]
    check_same_truth(quick.chain.engine.scheduler, anew.chain.engine.scheduler)


def test_these_lives_had_plans_that_continue_and_cross_borders() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        seen += life_of(seed, anew=False)[2]
    assert seen["plans"] > 100
    assert seen["borders"] > 10


def decoding(rows: int = 3, **options: Any) -> tuple[Chain, Counter[str]]:
    """Rows that have decoded for a while."""
    chain = make_chain(**options)
    taken_over = TakenOver(chain.engine.scheduler)
    for handle in range(1, rows + 1):
        chain.submit(handle, [handle, 2, 3], max_tokens=60, ignore_eos=True)
    chain.turn_until(lambda: taken_over.seen["plans"] > 4)
    return chain, taken_over.seen


def test_a_steady_decode_makes_no_plan_anew_borders_included() -> None:
    chain, seen = decoding(run_ahead=1)
    before, launched = Counter(seen), chain.ledger.launched
    for _ in range(24):
        chain.turn()
    assert seen["plans"] - before["plans"] == chain.ledger.launched - launched > 20
    assert seen["borders"] - before["borders"] >= 3 * 2


def test_a_row_that_is_aborted_is_in_no_plan_that_continues() -> None:
    chain, _ = decoding(run_ahead=2)
    slot = chain.slot_of("r2")
    recorder = Recorder(chain)
    chain.tell(m.Abort(1, ("r2",)))
    chain.turn()
    header = recorder.plans[0][:HEADER_WORDS]
    rows = recorder.plans[0][HEADER_WORDS : HEADER_WORDS + header[HEADER.offset("rows")]]
    assert header[HEADER.offset("row_list")] == 1
    assert len(rows) == 2
    assert slot not in rows


def test_plans_continue_with_the_launch_after_one_in_which_a_row_has_begun_or_ended() -> None:
    chain, seen = decoding(run_ahead=1)
    for message in ("begins", "ends"):
        if message == "begins":
            chain.submit(9, [4, 5], max_tokens=40, ignore_eos=True)
        else:
            chain.tell(m.Abort(1, ("r9",)))
        before = seen["plans"]
        chain.turn()
        assert chain.is_running("r9") == (message == "begins")
        assert seen["plans"] == before
        chain.turn()
        assert seen["plans"] == before + 1


def test_a_prompt_in_parts_is_planned_to_its_end_beside_rows_that_decode() -> None:
    chain, seen = decoding(run_ahead=1)  # a chunk has 16 tokens
    chain.submit(9, list(range(2, 42)), max_tokens=2, ignore_eos=True)
    before = seen["plans"]
    for _ in range(3):
        chain.turn()
    assert seen["plans"] == before
    chain.turn()
    assert seen["plans"] == before + 1
    chain.run()
    assert chain.tokens()[9] == completion(list(range(2, 42)), 0, 2, stops=set())


def test_a_waiting_request_that_may_be_admitted_ends_steady_decode() -> None:
    chain, seen = decoding(run_ahead=1)
    continued = seen["plans"]
    chain.submit(9, [4, 5], max_tokens=3)
    chain.turn()
    assert chain.is_running("r9")
    assert seen["plans"] == continued


@pytest.mark.parametrize("room", range(10))
def test_steady_decode_gives_a_row_a_block_with_the_launch_that_has_no_room_without_it(room: int) -> None:
    """A row that was held, or had drafts, at a border may have room for a whole block, or more."""
    size, blocks, rows = 4, 5, Rows(1, 4, 64)
    slots = np.array([rows.allocate()])
    length = blocks * size - room
    rows.begin(0, np.zeros(length, np.int32), blocks, 0)
    rows.max_len[0], rows.may_hold[0] = 60, True
    rows.plan_chunk(0, length, 7)
    plan = LaunchPlan(7, slots.astype(np.int32), np.array([True]), True, NO_APPENDS)
    steady = SteadyDecode(plan, rows, size)
    for number in range(8, 28):
        assert steady.advance_to(number)
        needs_one = length + 1 > blocks * size
        assert (steady.crossing(number).tolist() == [0]) == needs_one
        length, blocks = length + 1, blocks + needs_one


def test_in_steady_decode_the_state_of_a_row_that_may_be_held_grows_with_its_commits_alone() -> None:
    rows = Rows(2, 4, 64)
    slots = np.array([rows.allocate(), rows.allocate()])
    for slot in slots.tolist():
        rows.begin(slot, np.zeros(5, np.int32), 2, 0)
        rows.max_len[slot], rows.may_hold[slot] = 60, slot == 1
        rows.plan_chunk(slot, 5, 7)
    steady = SteadyDecode(LaunchPlan(7, slots.astype(np.int32), np.ones(2, np.bool_), True, NO_APPENDS), rows, 4)
    assert steady.advance_to(8)
    rows.plan_one_more(steady.step)
    assert rows.most_len.tolist() == [6, 6]
    assert rows.least_len.tolist() == rows.state_len.tolist() == [6, 5]
