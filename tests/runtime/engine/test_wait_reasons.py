"""The engine names what a request waited for longest before its first launch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runahead.runtime.engine.live_requests import WaitTimes
from runahead.runtime.scheduler.waiting import _SEARCHED_BLOCKS
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import SamplingParams, WaitReason
from tests.runtime.chain import Chain, make_chain, no_step

PENALISED = SamplingParams(frequency_penalty=0.5)
TURN_S = 1.0
L, P, R, K, S = (
    WaitReason.LAUNCH,
    WaitReason.PROMPT_BUDGET,
    WaitReason.ROW_SLOT,
    WaitReason.KV_BLOCKS,
    WaitReason.PENALTY_SLOT,
)


class Clock:
    """A second for each turn of the loop."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def slow_chain(**options: object) -> tuple[Chain, Clock]:
    clock = Clock()
    return make_chain(2, schedule=no_step, clock=clock, **options), clock  # type: ignore[arg-type]


def admission(chain: Chain, clock: Clock, handle: int) -> m.Admitted:
    """Turn until the request has a row."""
    while handle not in chain.admitted():
        chain.turn()
        clock.now += TURN_S
        assert clock.now < 1000
    return chain.admitted()[handle]


def behind_rows(chain: Chain) -> None:
    chain.submit(1, [3, 4], max_tokens=20, ignore_eos=True)
    chain.submit(2, [5, 6], max_tokens=9, ignore_eos=True)


def behind_blocks(chain: Chain) -> None:
    chain.submit(1, [3] * 8, max_tokens=30, ignore_eos=True)
    chain.submit(2, [5] * 30, max_tokens=9, ignore_eos=True)


def behind_paused_rows(chain: Chain) -> None:
    for handle in (1, 3, 4):
        chain.submit(handle, [handle] * 7, max_tokens=30, ignore_eos=True)
    chain.turn_until(lambda: chain.engine.scheduler.holdings.paused)
    chain.submit(2, [5, 6], max_tokens=9, ignore_eos=True)


def behind_a_penalty(chain: Chain) -> None:
    chain.submit(1, [3, 4], sampling=PENALISED, max_tokens=20, ignore_eos=True)
    chain.submit(2, [5, 6], sampling=PENALISED, max_tokens=9, ignore_eos=True)


def behind_prompts(chain: Chain) -> None:
    for handle in (1, 3, 4, 5, 6):
        chain.submit(handle, [handle] * 32, max_tokens=20, ignore_eos=True)
    chain.submit(2, [5, 6], max_tokens=9, ignore_eos=True)


def behind_admissions(chain: Chain) -> None:
    for handle in (1, 3, 4, 5, 6):
        chain.submit(handle, [handle] * 3, max_tokens=20, ignore_eos=True)
    chain.submit(2, [5, 6], max_tokens=9, ignore_eos=True)


def behind_launches(chain: Chain) -> None:
    chain.submit(1, [3, 4], max_tokens=20, ignore_eos=True)
    chain.turn()
    chain.submit(2, [5, 6], max_tokens=9, ignore_eos=True)
    chain.engine.intake.take()
    chain.engine._clock.now += TURN_S  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("situation", "options", "reason"),
    [
        (behind_rows, {"max_rows": 1}, R),
        (behind_blocks, {"num_blocks": 1 + 5}, K),
        (behind_paused_rows, {"num_blocks": 1 + 6}, K),
        (behind_a_penalty, {"penalty_slots": 1}, S),
        (behind_prompts, {}, P),
        (behind_admissions, {"admissions": 1}, P),
        (behind_launches, {}, L),
    ],
)
def test_the_longest_wait_of_a_request_is_named(
    situation: Callable[[Chain], None], options: dict[str, int], reason: WaitReason
) -> None:
    chain, clock = slow_chain(**options)
    situation(chain)
    told = admission(chain, clock, 2)
    assert told.waited_for is reason
    assert 0 < told.waited_s <= told.queue_s
    assert told.waited_s > 0.5 * told.queue_s, "it is what it waited for most of the time"
    assert chain.admitted()[1].waited_s == 0.0, "one that came to an idle engine did not wait"


def test_a_request_without_penalties_does_not_wait_for_a_penalty_slot() -> None:
    chain, clock = slow_chain(penalty_slots=1, max_rows=2)
    behind_a_penalty(chain)
    chain.submit(3, [7, 8], max_tokens=3, ignore_eos=True)
    chain.submit(4, [7, 9], max_tokens=3, ignore_eos=True)
    assert admission(chain, clock, 4).waited_for is R, "it lets others pass, which wait for a row"
    assert admission(chain, clock, 2).waited_for is S


def test_a_wait_begins_when_the_request_comes() -> None:
    """Others waited for a row before, and for longer."""
    chain, clock = slow_chain(max_rows=1, num_blocks=1 + 16)
    behind_rows(chain)
    waited_s = admission(chain, clock, 2).waited_s
    chain.submit(3, [7, 8], max_tokens=3, ignore_eos=True)
    told = admission(chain, clock, 3)
    assert (told.waited_for, told.waited_s) == (R, told.queue_s)
    assert told.waited_s < waited_s


def test_a_prefix_that_is_still_looked_up_waits_for_a_launch() -> None:
    chain, clock = slow_chain(num_blocks=1 + 200, context_length=1024, max_prefill_tokens=512, prefill_chunk=512)
    prompt = [7 + i % 50 for i in range(8 * (_SEARCHED_BLOCKS + 3))]
    chain.submit(1, prompt, max_tokens=2, ignore_eos=True)
    chain.run()
    waiting = chain.engine.scheduler.waiting
    chain.submit(2, prompt, max_tokens=2, ignore_eos=True)
    chain.engine.intake.take()
    assert waiting.next_admission() is None
    assert waiting.reasons() == (L, S), "no penalty slot is there"
    assert admission(chain, clock, 2).waited_for is L


def test_blocks_that_a_prefix_does_not_bring_are_waited_for() -> None:
    chain, clock = slow_chain(num_blocks=1 + 14, max_rows=4)
    shared = [7 + i % 50 for i in range(48)]
    chain.submit(1, shared, max_tokens=2, ignore_eos=True)
    chain.run()
    chain.submit(3, [3] * 5, max_tokens=40, ignore_eos=True)
    chain.turn_until(lambda: len(chain.tokens().get(3, [])) > 10)
    chain.submit(2, [*shared, *[4] * 36], max_tokens=2, ignore_eos=True)
    assert admission(chain, clock, 2).waited_for is K


def test_completions_that_wait_for_their_prompt_are_no_reason_for_others() -> None:
    chain, clock = slow_chain()
    chain.submit(1, [3] * 20, max_tokens=3, ignore_eos=True, n=3)
    chain.turn()
    assert chain.engine.scheduler.waiting.for_prompts == 2
    assert chain.engine.scheduler.waiting.reasons()[0] is L
    admission(chain, clock, 2)


def test_a_prompt_counts_the_launches_that_left_its_next_chunk_out_for_another_prompt() -> None:
    """Both long prompts get a chunk of the first launch. From then on row 1 decodes, and a launch has one chunk."""
    chain = make_chain(2, schedule=no_step, prefill_chunk=8, max_prefill_tokens=32, mixed_prefill_tokens=8)
    chain.submit(1, [3, 4], max_tokens=30, ignore_eos=True)
    chain.submit(2, [5] * 32, max_tokens=2, ignore_eos=True)
    chain.submit(3, [6] * 24, max_tokens=2, ignore_eos=True)
    chain.run()
    ends = {handle: end for handle, (end,) in chain.finished().items()}
    assert {handle: end.chunks_deferred for handle, end in ends.items()} == {1: 0, 2: 0, 3: 3}
    assert all(end.pauses == end.evictions == 0 for end in ends.values())


def test_times_of_reasons_add_up() -> None:
    times = WaitTimes()
    before = times.read(False, 10.0)
    times.planned((R, S), 11.0)
    times.planned((R, S), 12.0)
    times.planned((K, K), 14.0)
    assert times.longest(before, False, 15.0) == (R, 3.0)
    times.planned((L, L), 20.0)
    assert times.longest(before, False, 21.0) == (K, 6.0)
    assert times.longest(times.read(True, 30.0), True, 32.0) == (L, 2.0)
