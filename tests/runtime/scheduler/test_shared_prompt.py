"""Several completions of one prompt: each is that of a request alone, and the prompt is computed once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.scheduler.holdings import Holdings
from runahead.runtime.scheduler.ledger import Ledger
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.request import Request, SharedPrompt
from runahead.runtime.scheduler.rows import RowPhase, Rows
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import prepared_submit
from tests.cuda_graphs.simulated_device import seeded_schedule
from tests.runtime.chain import Chain, make_chain
from tests.simulation.clock import Clock

N = 16
PROMPT = [3 + (7 * i + i * i) % 50 for i in range(43)]
BLOCK = 8
MOST_SEED = (1 << 64) - 1
SIZES: dict[str, Any] = {"max_rows": N, "num_blocks": 200, "block_size": BLOCK}


def alone(seed: int, prompt: list[int] = PROMPT, **asked: Any) -> list[int]:
    """What a request gets that is served alone."""
    chain = make_chain(0, **SIZES)
    chain.submit(1, prompt, seed=seed % (1 << 64), max_tokens=20, **asked)
    chain.run()
    return chain.tokens()[1]


def computed(chain: Chain) -> int:
    stats = chain.engine.stats()
    return stats.prompt_tokens - stats.cached_tokens


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("depth", range(5))
def test_each_completion_is_that_of_a_request_alone_and_the_prompt_is_computed_once(
    depth: int, prefix_cache: bool
) -> None:
    chain = make_chain(depth, prefix_cache=prefix_cache, schedule=seeded_schedule(depth), **SIZES)
    first = MOST_SEED - 4  # the seeds begin again at 0
    chain.submit(1, PROMPT, seed=first, n=N, max_tokens=20)
    chain.run()
    assert chain.tokens() == {1 + i: alone(first + i) for i in range(N)}
    assert computed(chain) <= len(PROMPT) + N * BLOCK
    cached = {handle: end.cached_tokens for handle, (end,) in chain.finished().items()}
    assert cached == {1: 0, **{1 + i: 40 for i in range(1, N)}}, "all but the block with the last token"
    chain.check_nothing_is_left()
    assert prefix_cache == (chain.engine.scheduler.pool.findable > 0), "without a prefix cache no block stays"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_with_log_probabilities_of_the_prompt_it_is_computed_once_too_and_described_once(prefix_cache: bool) -> None:
    chain = make_chain(2, prefix_cache=prefix_cache, **SIZES)
    chain.submit(1, PROMPT, sampling=SamplingParams(seed=5, prompt_logprobs=2), n=N, max_tokens=20)
    chain.run()
    assert chain.tokens() == {1 + i: alone(5 + i) for i in range(N)}
    assert computed(chain) <= len(PROMPT) + N * BLOCK
    described = [one for _, one in chain.links.sent if isinstance(one, m.PromptLogprobs)]
    assert {one.handle for one in described} == {1}
    assert sum(len(one.chosen) // 4 for one in described) == len(PROMPT) - 1


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 20])
def test_more_completions_than_rows_wait_and_a_first_one_that_ends_at_once_leaves_its_blocks(
    prefix_cache: bool, max_tokens: int
) -> None:
    chain = make_chain(1, prefix_cache=prefix_cache, max_rows=3, num_blocks=100, block_size=BLOCK)
    chain.submit(1, PROMPT, seed=5, n=N, max_tokens=max_tokens)
    chain.run()
    assert chain.tokens() == {1 + i: alone(5 + i)[:max_tokens] for i in range(N)}
    assert computed(chain) <= len(PROMPT) + N * BLOCK
    chain.check_nothing_is_left()


def test_a_prompt_of_one_block_has_nothing_to_share_and_nobody_waits_for_it() -> None:
    chain = make_chain(2, **SIZES)
    chain.submit(1, PROMPT[:BLOCK], seed=5, n=4, max_tokens=20)
    chain.turn()
    assert {chain.engine.scheduler.holdings.phase_of(one.request) for one in chain.engine.registry.all()} != {"WAITING"}
    assert chain.engine.scheduler.waiting.for_prompts == 0
    chain.run()
    assert chain.tokens() == {1 + i: alone(5 + i, PROMPT[:BLOCK]) for i in range(4)}


def test_a_prompt_that_is_cached_is_computed_by_nobody() -> None:
    chain = make_chain(2, **SIZES)
    chain.submit(1, PROMPT, seed=5, max_tokens=2)
    chain.run()
    chain.submit(2, PROMPT, seed=5, n=4, max_tokens=20)
    chain.run()
    assert [chain.finished()[2 + i][0].cached_tokens for i in range(4)] == [40] * 4
    assert {handle: said for handle, said in chain.tokens().items() if handle > 1} == {
        2 + i: alone(5 + i) for i in range(4)
    }


def test_others_are_served_while_completions_wait_for_their_prompt() -> None:
    chain = make_chain(2, prefill_chunk=8, max_prefill_tokens=16, **SIZES)
    chain.submit(1, PROMPT * 2, seed=5, n=8, max_tokens=4)
    chain.submit(20, PROMPT[:9], seed=1, max_tokens=2)
    chain.turn_until(lambda: 20 in chain.finished())
    assert chain.engine.scheduler.waiting.for_prompts == 7, "they wait all the time, or this test shows nothing"
    chain.run()
    assert chain.tokens()[8] == alone(12, PROMPT * 2)[:4]


@pytest.mark.parametrize("phase", [RowPhase.PREFILL, RowPhase.DECODE])
def test_an_abort_ends_all_completions_in_whatever_phase(phase: RowPhase) -> None:
    chain = make_chain(2, prefill_chunk=8, max_prefill_tokens=8, **SIZES)
    chain.submit(1, PROMPT, n=N, max_tokens=20)
    served = chain.engine.registry
    chain.turn_until(
        lambda: phase.name in {chain.engine.scheduler.holdings.phase_of(one.request) for one in served.all()}
    )
    chain.tell(m.Abort(1, ("r1",)))
    chain.run()
    assert [end.reason for ends in chain.finished().values() for end in ends] == [FinishReason.ABORTED] * N
    (answer,) = [one for _, one in chain.links.sent if isinstance(one, m.AbortResult)]
    assert (answer.request_ids, answer.outcomes) == (("r1",), ("ABORTED",))
    assert chain.engine.registry.has_finished("r1")
    chain.check_nothing_is_left()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_nobody_waits_for_a_first_completion_that_was_cancelled(prefix_cache: bool) -> None:
    chain = make_chain(2, prefix_cache=prefix_cache, prefill_chunk=8, max_prefill_tokens=8, **SIZES)
    chain.submit(1, PROMPT, seed=5, n=4, max_tokens=20)
    chain.turn_until(lambda: chain.is_running("r1"))
    assert chain.engine.scheduler.waiting.for_prompts == 3
    chain.tell(m.Cancel(1))
    chain.run()
    assert {handle: said for handle, said in chain.tokens().items() if handle > 1} == {
        1 + i: alone(5 + i) for i in range(1, 4)
    }
    chain.check_nothing_is_left()
    assert chain.engine.registry.has_finished("r1")


def test_a_first_completion_that_is_cancelled_before_it_has_a_row_keeps_nobody_waiting() -> None:
    chain = make_chain(2, max_rows=1, num_blocks=100, block_size=BLOCK)
    chain.submit(50, PROMPT, max_tokens=30)
    chain.submit(51, PROMPT[1:], seed=5, n=3, max_tokens=20)
    chain.turn_until(lambda: chain.is_running("r50"))
    chain.tell(m.Cancel(51))
    chain.tell(m.Cancel(52))  # which waits for the prompt
    chain.run()
    assert chain.tokens()[53] == alone(7, PROMPT[1:])
    assert set(chain.tokens()) == {50, 53}


def test_a_first_completion_that_is_not_finite_fails_alone_and_the_others_find_nothing_of_it() -> None:
    chain = make_chain(2, prefill_chunk=8, max_prefill_tokens=8, **SIZES)
    chain.submit(1, PROMPT, sampling=SamplingParams(seed=5, prompt_logprobs=0), n=3, max_tokens=20)
    chain.turn_until(lambda: chain.is_running("r1"))
    chain.engine.scheduler.holdings.not_finite(np.array([chain.slot_of("r1")], np.int32))
    chain.run()
    assert chain.finished()[1][0].reason == FinishReason.NON_FINITE
    assert chain.tokens() == {2: alone(6), 3: alone(7)}
    assert chain.finished()[2][0].cached_tokens == 0


def test_completions_are_counted_in_the_queue_and_refused_together() -> None:
    chain = make_chain(2, max_rows=2, max_queue=4, num_blocks=100, block_size=BLOCK)
    chain.submit(1, PROMPT, n=7, max_tokens=20)
    chain.submit(8, PROMPT, n=6, max_tokens=20)
    chain.submit(14, PROMPT, n=2, max_tokens=20)
    chain.turn()
    first, second = chain.refused()
    assert (first.handle, first.code, second.handle) == (1, "RESOURCE_EXHAUSTED", 14)
    assert first.message == "0 requests wait, and 7 more are over the limit of 4"
    assert len(chain.engine.registry) == 6
    chain.run()
    assert chain.engine.stats().submitted == 6


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [0, 2, 4])
def test_rows_that_are_evicted_say_what_they_say_alone(depth: int, prefix_cache: bool) -> None:
    chain = make_chain(depth, prefix_cache=prefix_cache, max_rows=6, num_blocks=17, block_size=4)
    for i in range(3):
        chain.submit(1 + 8 * i, PROMPT[: 30 - 7 * i], seed=5, n=6, request_id=f"p{i}", max_tokens=20)
    chain.run()
    assert chain.engine.stats().events["evicted"].count > 0
    assert chain.tokens() == {1 + 8 * i + k: alone(5 + k, PROMPT[: 30 - 7 * i]) for i in range(3) for k in range(6)}
    chain.check_nothing_is_left()
    assert prefix_cache == (chain.engine.scheduler.pool.findable > 0)


def test_each_completion_has_its_own_penalties() -> None:
    chain = make_chain(2, penalty_slots=2, **SIZES)
    sampling = SamplingParams(seed=5, repetition_penalty=1.3, frequency_penalty=0.5)
    chain.submit(1, PROMPT, sampling=sampling, n=5, max_tokens=20)
    chain.run()
    found = chain.tokens()
    for i in range(5):
        one = make_chain(0, penalty_slots=1, **SIZES)
        asked = SamplingParams(seed=5 + i, repetition_penalty=1.3, frequency_penalty=0.5)
        one.submit(1, PROMPT, sampling=asked, max_tokens=20)
        one.run()
        assert found[1 + i] == one.tokens()[1]


def test_an_announced_request_that_is_aborted_ends_each_of_its_completions() -> None:
    chain = make_chain(2, **SIZES)
    chain.tell(m.Announce(1, "r1", n=3))
    chain.tell(m.Abort(1, ("r1",)))
    chain.run()
    assert {handle: end.reason for handle, (end,) in chain.finished().items()} == dict.fromkeys(
        (1, 2, 3), FinishReason.ABORTED
    )


# ------------------------------------------------------------ with recurrent states


def sharing(snapshots: int = 4, snapshot_tokens: int = 0, state_unit: int = 1) -> Holdings:
    """Of an engine without a prefix cache whose model keeps states, in blocks of 8."""
    limits = SchedulerLimits(
        128, 100, (), 16, 32, 2048, 4096, prefix_cache=False, has_state=True, snapshots=snapshots,
        snapshot_tokens=snapshot_tokens, state_unit=state_unit,
    )  # fmt: skip
    return Holdings(limits, Rows(4, 1, 128), BlockPool(40, BLOCK), Ledger(1, 512))


def completions(prompt: int, n: int = 2) -> list[Request]:
    tokens = np.arange(prompt, dtype=np.int32)
    sampling, stopping = SamplingParams(), StoppingParams(4)
    return [Request(1, 1 + i, "r", tokens, sampling, stopping, prompt + 4) for i in range(n)]


@pytest.mark.parametrize(
    ("state_unit", "prompt", "blocks"),
    [(1, 9, 1), (1, 8, 0), (1, 100, 12), (64, 64, 0), (64, 65, 8), (64, 127, 8), (12, 100, 12)],
)
def test_a_state_is_cut_where_its_recurrence_may_be(state_unit: int, prompt: int, blocks: int) -> None:
    requests = completions(prompt)
    sharing(state_unit=state_unit).shared.share(requests)
    shared = requests[0].shared_prompt
    assert (shared.blocks if shared else 0) == blocks
    assert {one.shared_prompt for one in requests} == {shared}


def test_without_a_place_for_a_state_nothing_is_shared() -> None:
    requests = completions(50)
    sharing(snapshots=0).shared.share(requests)
    assert not any(one.shared_prompt for one in requests)


@pytest.mark.parametrize("state", ["in a snapshot", "at a border with one", "no snapshot is left"])
def test_the_first_completion_has_its_state_in_a_snapshot_where_one_is_left_and_no_other_is_taken(state: str) -> None:
    holdings = sharing(1, snapshot_tokens=48 if state == "at a border with one" else 0)
    first, second = completions(50)
    holdings.shared.share([first, second])
    if state == "no snapshot is left":
        holdings.snapshots.allocate(1)
    place = holdings.shared.allocate_state(first, 0)
    assert (place == 4, first.prompt_state == 1) == ((True, True) if state == "in a snapshot" else (False, False))
    assert holdings.shared.allocate_state(second, 0) < 4, "the others have a slot"


@pytest.mark.parametrize("length", [9, 20, 40, 100])
@pytest.mark.parametrize("seed", range(8))
def test_a_caller_whose_first_completion_has_ended_gets_a_row_for_the_others(seed: int, length: int) -> None:
    """They line up while the first one's row slot is fenced, and another caller's requests wait."""
    chain = make_chain(4, max_rows=2, clock=Clock(), schedule=seeded_schedule(seed))
    for handle in range(1, 7):
        chain.tell(asked("alice", handle, 40))
    chain.tell(asked("bob", 20, 1, n=2, length=length))
    chain.run()
    assert chain.finished().keys() == {1, 2, 3, 4, 5, 6, 20, 21}


def test_a_row_leaves_for_a_completion_whose_first_one_was_cancelled_without_a_row() -> None:
    clock = Clock()
    chain = make_chain(1, max_rows=2, clock=clock)
    for handle in range(1, 5):
        chain.tell(asked("alice", handle, 100))
    chain.turn_until(lambda: len(chain.admitted()) == 2)
    chain.tell(asked("bob", 20, 1, n=2, length=20))
    chain.turn()
    chain.tell(m.Cancel(20))
    chain.turn()
    clock.pass_by(1.5)
    chain.turn_until(lambda: 21 in chain.finished(), limit=24)


def test_a_turn_looks_at_no_completion_that_waits_for_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(1, max_rows=1, num_blocks=200, block_size=BLOCK)
    chain.tell(asked("alice", 1, 40))
    chain.turn_until(lambda: bool(chain.admitted()))
    for handle in range(100, 200, 10):
        chain.tell(asked("alice", handle, 1, n=10, length=20))
    chain.turn()
    waiting, looks = chain.engine.scheduler.waiting, list[Request]()

    def is_awaited_by(prompt: SharedPrompt, request: Request) -> bool:
        looks.append(request)
        return True

    monkeypatch.setattr(SharedPrompt, "is_awaited_by", is_awaited_by)
    chain.turn()
    assert waiting.for_prompts == 90 and not looks


def asked(caller: str, handle: int, tokens: int, n: int = 1, length: int = 3) -> m.Submit:
    prompt = np.arange(length, dtype=np.int32) % 60 + 2
    return prepared_submit(
        handle, f"{caller}/{handle}", prompt, SamplingParams(seed=0), StoppingParams(tokens, ignore_eos=True),
        block_size=BLOCK, priority=0, caller=caller, outranks=False, n=n,
    )  # fmt: skip
