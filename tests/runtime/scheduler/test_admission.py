"""Who gets a row, and when: blocks that are needed, penalty slots, the bound in prompt tokens."""

from __future__ import annotations

import pytest

from runahead.runtime.engine.figures import LogMode
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.pressure import whole
from tests.runtime.scheduler.played import record_of

PENALISED = SamplingParams(frequency_penalty=0.5)


def test_rows_that_hold_all_they_can_ever_use_ask_for_no_spare_block() -> None:
    chain = make_chain(2, schedule=no_step, num_blocks=1 + 8, max_rows=8)
    for handle in range(1, 9):
        chain.submit(handle, [handle + 2, 4], max_tokens=6, ignore_eos=True)
    chain.turn()
    assert len(chain.engine.scheduler.holdings.requests()) == 8
    chain.run()
    assert "paused" not in chain.engine.stats().events


def test_a_block_to_go_on_is_left_for_every_row_that_may_grow() -> None:
    chain = make_chain(2, schedule=no_step, num_blocks=1 + 8, max_rows=8)
    for handle in range(1, 9):
        chain.submit(handle, [handle + 2, 4], max_tokens=40, ignore_eos=True)
    chain.turn()
    assert len(chain.engine.scheduler.holdings.requests()) == 4


def test_a_launch_admits_no_more_than_it_may_and_the_next_goes_on() -> None:
    chain = make_chain(1, schedule=no_step, admissions=3)
    for handle in range(1, 9):
        chain.submit(handle, [handle + 2, 4], max_tokens=40, ignore_eos=True)
    admitted: list[int] = []
    while len(chain.admitted()) < 8:
        before = len(chain.admitted())
        chain.turn()
        admitted.append(len(chain.admitted()) - before)
    assert admitted == [3, 3, 2]
    chain.run()
    chain.check_nothing_is_left()


def running(chain: Chain) -> list[int]:
    return [handle for handle in (1, 2, 3) if chain.is_running(f"r{handle}")]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_request_that_waits_for_a_penalty_slot_lets_others_pass_and_has_it_when_it_is_free(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, penalty_slots=1)
    chain.submit(1, [3, 4], sampling=PENALISED, max_tokens=20, ignore_eos=True)
    chain.submit(2, [5, 6], sampling=PENALISED, max_tokens=5, ignore_eos=True)
    chain.submit(3, [7, 8], max_tokens=40, ignore_eos=True)
    chain.turn()
    assert running(chain) == [1, 3]
    chain.turn_until(lambda: chain.is_running("r2"))
    assert running(chain) == [2, 3]
    assert len(chain.tokens()[1]) == 20
    chain.run()
    assert chain.tokens()[3] == whole([7, 8], 40)
    assert len(chain.tokens()[2]) == 5
    chain.check_nothing_is_left()


def test_a_plan_carries_no_more_prompt_tokens_than_may_be_queued_behind_uncommitted_ones() -> None:
    """Whoever asked before: a row that was paused when the tokens were counted may go on in the plan."""
    chain = make_chain(2, schedule=no_step, run_ahead_tokens=20)
    chain.submit(1, [3] * 40, max_tokens=5)
    scheduler, ledger = chain.engine.scheduler, chain.ledger
    chain.engine.intake.take()
    first = scheduler.plan()
    assert first is not None and [chunk.tokens.size for chunk in first.plan.chunks] == [16]
    ledger.enqueue(record_of(first, first=True))
    assert ledger.prompt_room == 4
    assert scheduler.plan() is None


@pytest.mark.parametrize("depth", [0, 2])
def test_a_chain_that_is_idle_before_a_logged_launch_is_not_drained_again_and_again(depth: int) -> None:
    chain = make_chain(depth, log_interval=1, log_mode=LogMode.BARRIER)
    chain.submit(1, [3, 4], max_tokens=3, ignore_eos=True)
    chain.run()
    reads: list[int] = []
    read_rows = chain.device.read_rows
    chain.device.read_rows = lambda: reads.append(1) or read_rows()  # type: ignore[method-assign,func-returns-value]
    for _ in range(20):
        chain.turn()
    assert not reads
    chain.tell(m.Submit(2, "r2", b"\3\0\0\0", SamplingParams(), StoppingParams(3, ignore_eos=True)))
    chain.run()
    stats = chain.engine.stats()
    assert stats.barriers["logging"] == stats.launches
    assert reads


@pytest.mark.parametrize(("evictions", "more"), [(0, 0), (1, 1), (2, 3), (3, 5)])
def test_the_more_often_a_request_was_evicted_the_more_room_it_gets(evictions: int, more: int) -> None:
    """After its third time, all that it and the rows beside it may become."""
    chain = make_chain(2, schedule=no_step, num_blocks=1 + 40, max_rows=2)
    chain.submit(1, [3] * 8, max_tokens=40, ignore_eos=True)
    chain.turn()
    scheduler = chain.engine.scheduler
    chain.submit(2, [4] * 8, max_tokens=41, ignore_eos=True)
    tracked = chain.engine.registry.by_id("r1")
    assert tracked is not None
    beside = scheduler.waiting._needed_by_rows()[evictions >= 3]
    tracked.request.evictions = evictions
    size = scheduler.pool.block_size
    own = -(-8 // size) + more
    assert scheduler.waiting._blocks_needed(tracked.request) == own + beside
