"""How far ahead: decode reaches the full depth whatever the rows, prompts only as far as their tokens allow."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest

from runahead.cuda_graphs.device import LaunchShape
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import SamplingParams
from tests.cuda_graphs.simulated_device import SimulatedDevice
from tests.runtime.chain import Chain, make_chain, no_step


def steady_depths(chain: Chain, rows: int, turns: int = 12) -> Counter[int]:
    """Depths at which launches were enqueued once `rows` rows decode."""
    decoding = chain.engine.scheduler.tally.counters
    while chain.engine.stats().running < rows or decoding["generated_tokens"] < 6 * rows:
        chain.engine.turn()
    before = chain.engine.figures.launches_by_depth.copy()
    for _ in range(turns):
        chain.engine.turn()
    return chain.engine.figures.launches_by_depth - before


@pytest.mark.parametrize("waiting", [0, 4])
def test_300_rows_in_decode_reach_the_full_depth_whatever_the_bound_in_tokens(waiting: int) -> None:
    chain = make_chain(4, schedule=no_step, max_rows=300, num_blocks=300 * 8 + 1, context_length=64,
                       max_prefill_tokens=256, run_ahead_tokens=256)  # fmt: skip
    for handle in range(1, 301 + waiting):
        chain.submit(handle, [3, 4], max_tokens=60, ignore_eos=True)
    depths = steady_depths(chain, 300)
    assert depths[4] >= 12
    assert set(depths) == {4}
    assert len(chain.engine.scheduler.waiting) == waiting


def long_prompts_beside_a_decode(run_ahead_tokens: int) -> Chain:
    chain = make_chain(4, schedule=no_step, max_prefill_tokens=16, run_ahead_tokens=run_ahead_tokens)
    chain.submit(1, [3] * 4, max_tokens=100, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    for handle in range(2, 6):
        chain.submit(handle, [handle] * 100, max_tokens=4, ignore_eos=True)
    return chain


def test_a_long_launch_is_held_back_and_counted() -> None:
    chain = long_prompts_beside_a_decode(run_ahead_tokens=32)
    most = 0
    while len(chain.finished()) < 4:
        chain.turn()  # the watched ledger refuses what is over the bound
        most = max(most, chain.ledger.uncommitted_prompt_tokens)
    assert most == 32, "two chunks are as much as the bound allows"
    assert chain.engine.stats().held_back > 0
    chain.run()


@pytest.mark.parametrize("run_ahead_tokens", [16, 24, 40, 512])
def test_there_is_room_for_a_launch_where_what_it_would_carry_has_room(run_ahead_tokens: int) -> None:
    chain = long_prompts_beside_a_decode(run_ahead_tokens)
    ledger, scheduler, has_room = chain.ledger, chain.engine.scheduler, chain.engine._has_room
    seen = Counter[bool]()

    def compared() -> bool:
        if ledger.has_room:
            expected = ledger.has_room_for(scheduler.prompt_tokens_wanted())
            assert has_room() == expected
            seen[expected] += 1
        return has_room()

    chain.engine._has_room = compared  # type: ignore[method-assign]
    chain.run()
    assert seen[True]
    assert bool(seen[False]) == (run_ahead_tokens < 512)


def test_nothing_is_held_back_where_the_bound_is_wide() -> None:
    chain = long_prompts_beside_a_decode(run_ahead_tokens=512)
    most = 0
    while len(chain.finished()) < 4:
        chain.turn()
        most = max(most, chain.ledger.uncommitted_prompt_tokens)
    assert most > 32
    assert chain.engine.stats().held_back == 0


def test_a_held_back_launch_goes_as_soon_as_the_tokens_before_it_are_there() -> None:
    chain = make_chain(4, schedule=no_step, max_prefill_tokens=16, run_ahead_tokens=1)
    chain.submit(1, [3] * 100, max_tokens=4, ignore_eos=True)
    chain.turn_until(lambda: chain.finished())
    assert chain.engine.figures.launches_by_depth[1] >= 7, "each of the 7 chunks was alone"


def test_a_plan_never_carries_more_prompt_tokens_than_were_asked_for_beforehand() -> None:
    chain = make_chain(4, schedule=no_step, max_rows=4, max_prefill_tokens=40)
    scheduler, wanted, carried = chain.engine.scheduler, [0], [0]
    plan = scheduler.plan

    def watched_plan() -> object:
        wanted.append(scheduler.prompt_tokens_wanted())
        made = plan()
        carried.append(sum(chunk.tokens.size for chunk in made.plan.chunks) if made else 0)
        return made

    scheduler.plan = watched_plan  # type: ignore[method-assign, assignment]
    for handle in range(1, 20):
        chain.submit(handle, [handle] * (7 * handle % 90 + 1), max_tokens=5)
        chain.turn()
    chain.run()
    assert 32 < max(carried) <= 40
    assert all(most >= tokens for most, tokens in zip(wanted, carried, strict=True))


def test_a_request_that_waits_for_blocks_does_not_hold_decode_back() -> None:
    chain = make_chain(4, schedule=lambda: 0, num_blocks=7, max_rows=4, run_ahead_tokens=8)
    chain.submit(1, [3, 4], max_tokens=40, ignore_eos=True)
    chain.submit(2, [5, 4] * 20, max_tokens=1, ignore_eos=True)
    for _ in range(6):
        chain.turn()
    assert len(chain.engine.scheduler.waiting) == 1, "the second must wait for blocks, or this test shows nothing"
    assert chain.engine.figures.depth_max == 4
    chain.run()
    assert len(chain.tokens()[2]) == 1


def test_short_prompts_are_counted_as_what_they_are_and_hold_nothing_back() -> None:
    """The bound is a whole chunk: short prompts that come one after the other fit under it together."""
    chain = make_chain(4, schedule=no_step, max_prefill_tokens=16, run_ahead_tokens=16)
    chain.submit(1, [3] * 4, max_tokens=100, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    for handle in range(2, 12):
        chain.submit(handle, [handle, 4], max_tokens=4, ignore_eos=True)
        chain.turn()
        chain.turn()
    chain.run()
    stats = chain.engine.stats()
    assert stats.launches_by_kind["mixed"] > 5
    assert stats.held_back == 0


def test_the_rest_of_a_prompt_is_counted_not_a_whole_chunk() -> None:
    chain = make_chain(1, schedule=no_step)
    scheduler = chain.engine.scheduler
    chain.submit(1, [3] * 19, max_tokens=5)
    chain.engine.intake.take()
    assert scheduler.prompt_tokens_wanted() == 16
    chain.turn()
    assert scheduler.prompt_tokens_wanted() == 3


def test_those_who_wait_are_counted_as_far_as_they_can_be_admitted() -> None:
    chain = make_chain(1, schedule=no_step, num_blocks=1 + 6, max_prefill_tokens=100, penalty_slots=1)
    scheduler, penalised = chain.engine.scheduler, SamplingParams(presence_penalty=1.0)
    for handle in range(1, 9):
        chain.submit(handle, [handle + 2] * 14, max_tokens=3)
    chain.engine.intake.take()
    assert scheduler.prompt_tokens_wanted() == 3 * 14, "blocks are there for three of the eight"
    chain.tell(m.Abort(1, (), True))
    for handle in range(11, 19):
        chain.submit(handle, [handle, 4, 5], sampling=penalised, max_tokens=3)
    chain.submit(19, [9, 9], max_tokens=3)
    chain.engine.intake.take()
    chain.engine.intake.take()
    assert scheduler.prompt_tokens_wanted() == 3 + 2, "and a penalty slot for one"


class InPieces(SimulatedDevice):
    """A device whose launches with prompts take 300 calls each, of which it takes 700 without waiting."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls_at_once, self.most = 700, 0
        self.waiting = deque[tuple[int, int]]()

    def calls(self, shape: LaunchShape) -> int:
        return 1 if shape.is_decode or shape.is_closing else 300

    def launch(self, shape: LaunchShape) -> None:
        super().launch(shape)
        self.waiting.append((shape.number, self.calls(shape)))
        while self.waiting[0][0] <= self._ended:
            self.waiting.popleft()
        self.most = max(self.most, sum(calls for _, calls in self.waiting))


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 4])
def test_no_call_of_a_launch_would_wait_for_the_device_and_the_tokens_are_the_same(run_ahead: int) -> None:
    found = []
    for device_type in (SimulatedDevice, InPieces):
        chain = make_chain(run_ahead, schedule=no_step, max_prefill_tokens=16, device_type=device_type)
        for handle in range(1, 6):
            chain.submit(handle, [handle] * 100, max_tokens=10, ignore_eos=True)
        chain.run()
        found.append(chain.tokens())
    assert found[0] == found[1]
    device = chain.device
    assert isinstance(device, InPieces)
    assert device.most <= 700
    assert (device.most >= 600) == (run_ahead > 0), "one runs and one is queued"
    assert (chain.engine.stats().held_back > 0) == (run_ahead > 1), "a third would have been queued"


@pytest.mark.parametrize(("mixed", "most"), [(8, 8), (20, 20), (64, 48)])
def test_prompts_beside_rows_that_decode_are_spread_over_launches(mixed: int, most: int) -> None:
    chain = make_chain(2, schedule=no_step, max_prefill_tokens=64, prefill_chunk=8, mixed_prefill_tokens=mixed)
    chain.submit(1, [3] * 4, max_tokens=100, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    for handle in range(2, 8):
        chain.submit(handle, [handle] * 8, max_tokens=2, ignore_eos=True)
    found = prompt_tokens_of_launches(chain)
    assert max(found) == min(mixed // 8 * 8, most)
    assert sum(found) == 48


def test_prompts_alone_fill_a_launch_whatever_they_may_beside_others() -> None:
    chain = make_chain(2, schedule=no_step, max_prefill_tokens=64, prefill_chunk=8, mixed_prefill_tokens=8)
    for handle in range(1, 7):
        chain.submit(handle, [handle] * 8, max_tokens=1, ignore_eos=True)
    assert max(prompt_tokens_of_launches(chain)) == 48


@pytest.mark.parametrize(
    ("decoding", "waiting", "most"),
    [(100, 0, 412), (100, 824, 412), (100, 825, 924), (100, 1848, 924), (100, 1849, 1408), (256, 500, 256),
     (257, 500, 767), (800, 500, 1408)],
)  # fmt: skip
def test_prompts_that_wait_beside_rows_are_computed_in_two_launches(decoding: int, waiting: int, most: int) -> None:
    limits = SchedulerLimits(4096, 100, (1,), 2048, 8192, 4096, 4096, mixed_prefill_tokens=1408, mixed_graph_tokens=512)
    assert limits.mixed_tokens(decoding, waiting) == most
    assert replace(limits, mixed_graph_tokens=0).mixed_tokens(decoding, waiting) == 1408
    assert replace(limits, mixed_prefill_tokens=300).mixed_tokens(decoding, waiting) == min(300, most)


def test_two_prompts_are_cut_so_that_two_launches_are_equally_long() -> None:
    chain = make_chain(2, schedule=no_step, max_prefill_tokens=80, prefill_chunk=80)
    scheduler = chain.engine.scheduler
    scheduler.limits = replace(scheduler.limits, mixed_graph_tokens=33, piece_tokens=8)
    chain.submit(1, [3] * 4, max_tokens=100, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    for handle, length in ((2, 44), (3, 20)):
        chain.submit(handle, [handle] * length, max_tokens=2, ignore_eos=True)
    assert prompt_tokens_of_launches(chain) == [32, 32]


def prompt_tokens_of_launches(chain: Chain) -> list[int]:
    """Prompt tokens of each launch, until all requests but the first have ended."""
    found: list[int] = []
    make = chain.engine.scheduler.plan

    def plan() -> Any:
        planned = make()
        if planned is not None and planned.plan.chunks:
            found.append(sum(chunk.tokens.size for chunk in planned.plan.chunks))
        return planned

    chain.engine.scheduler.plan = plan  # type: ignore[method-assign]
    chain.run()
    return found
