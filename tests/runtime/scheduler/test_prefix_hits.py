"""A prompt's beginning is found in the cache, and only where every token of it is there and right."""

from __future__ import annotations

import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.pressure import request_of, whole
from tests.runtime.programs.hash_model import penalised_completion

DEPTHS = [0, 1, 2, 4]
AHEAD = [1, 2, 4]
PROMPT = [(7 * i) % 90 + 2 for i in range(40)]  # five blocks of 8


def ask(chain: Chain, handle: int, prompt: list[int], count: int = 5, salt: str = "") -> None:
    chain.submit(handle, prompt, max_tokens=count, ignore_eos=True, cache_salt=salt)


def cached(chain: Chain, handle: int) -> int:
    """Tokens that a request took from the cache, as its admission says."""
    said = chain.admitted()[handle].cached_tokens
    ends = chain.finished().get(handle)
    assert not ends or ends[0].cached_tokens == said, "and as its end says"
    return said


# ---------------------------------------------------------------- what is found


@pytest.mark.parametrize(
    ("length", "found"), [(7, 0), (8, 0), (9, 8), (16, 8), (17, 16), (39, 32), (40, 32)], ids=lambda value: f"{value}"
)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_prompt_is_found_after_its_first_request_finished_but_for_its_last_token(
    depth: int, length: int, found: int
) -> None:
    chain = make_chain(depth, schedule=no_step)
    for handle in (1, 2):
        ask(chain, handle, PROMPT[:length])
        chain.run()
    assert [cached(chain, handle) for handle in (1, 2)] == [0, found]
    assert chain.tokens() == {handle: whole(PROMPT[:length], 5) for handle in (1, 2)}
    stats = chain.engine.stats()
    assert (stats.cached_tokens, stats.queried_tokens, stats.prompt_tokens) == (found, 2 * length, 2 * length)
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_completion_is_found_as_the_prompt_of_the_next_turn(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    ask(chain, 1, PROMPT[:12], 20)
    chain.run()
    # 31 of its 32 tokens were forwarded: the last one by nobody.
    longer = PROMPT[:12] + chain.tokens()[1] + [5, 6]
    ask(chain, 2, longer)
    chain.run()
    assert cached(chain, 2) == 24
    assert chain.tokens()[2] == whole(longer, 5)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_prompt_is_found_after_an_abort(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    ask(chain, 1, PROMPT, 50)
    chain.turn_until(lambda: chain.tokens().get(1))
    chain.tell(m.Abort(1, ("r1",)))
    ask(chain, 2, PROMPT)
    chain.run()
    assert chain.finished()[1][0].reason == FinishReason.ABORTED
    assert cached(chain, 2) == 32
    assert chain.tokens()[2] == whole(PROMPT, 5)
    chain.check_nothing_is_left()


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("depth", DEPTHS)
def test_what_an_aborted_prompt_had_computed_is_found_and_no_more(depth: int, chunks: int) -> None:
    chain = make_chain(depth, schedule=no_step, run_ahead_tokens=1)
    ask(chain, 1, PROMPT)
    chain.turn_until(lambda: chain.engine.scheduler.tally.counters["prefill_chunks"] == chunks)
    chain.tell(m.Abort(1, ("r1",)))
    chain.run()
    assert chain.engine.stats().aborted == {"PREFILL": 1}
    ask(chain, 2, PROMPT)
    chain.run()
    assert cached(chain, 2) == 16 * chunks
    assert chain.tokens() == {2: whole(PROMPT, 5)}


@pytest.mark.parametrize("depth", DEPTHS)
def test_requests_that_run_beside_each_other_share_blocks(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    ask(chain, 1, PROMPT, 40)
    chain.turn_until(lambda: chain.tokens().get(1))
    for handle in (2, 3):
        ask(chain, handle, [*PROMPT[:35], handle], 10)
    chain.turn_until(lambda: chain.is_running("r3"))
    first, second, third = (request_of(chain, handle) for handle in (1, 2, 3))
    assert first.blocks[:4] == second.blocks[:4] == third.blocks[:4]
    assert not {*first.blocks[4:]} & {*second.blocks[4:]}, "the block that holds the last prompt token is owned"
    assert chain.engine.scheduler.pool.owned == len({*first.blocks, *second.blocks, *third.blocks})
    chain.tell(m.Abort(1, ("r2",)))
    chain.run()
    assert [cached(chain, handle) for handle in (1, 2, 3)] == [0, 32, 32]
    assert chain.tokens()[1] == whole(PROMPT, 40)
    assert chain.tokens()[3] == whole([*PROMPT[:35], 3], 10)
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_another_salt_finds_nothing(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    for handle, salt in enumerate(("", "a", "b", "a", ""), start=1):
        ask(chain, handle, PROMPT, salt=salt)
        chain.run()
    assert [cached(chain, handle) for handle in range(1, 6)] == [0, 0, 0, 32, 32]
    assert all(tokens == whole(PROMPT, 5) for tokens in chain.tokens().values())


def test_without_the_cache_nothing_is_found() -> None:
    chain = make_chain(prefix_cache=False)
    for handle in (1, 2):
        ask(chain, handle, PROMPT)
        chain.run()
    assert [cached(chain, handle) for handle in (1, 2)] == [0, 0]
    assert chain.engine.scheduler.pool.findable == chain.engine.stats().blocks_cached == 0
    assert chain.engine.stats().queried_tokens == 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_cached_blocks_are_reused_where_nothing_is_free_and_then_not_found(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, num_blocks=1 + 8)
    prompts = {1: PROMPT, 2: [5] * 40, 3: PROMPT}
    for handle, prompt in prompts.items():
        ask(chain, handle, prompt)
        chain.run()
    assert cached(chain, 3) < 32, "the second request needed some of its blocks"
    assert chain.tokens() == {handle: whole(prompt, 5) for handle, prompt in prompts.items()}
    chain.check_nothing_is_left()


# ---------------------------------------------------------------- when


@pytest.mark.parametrize("depth", AHEAD)
def test_a_block_is_not_findable_before_the_launch_that_wrote_it_has_retired(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    pool, ledger = chain.engine.scheduler.pool, chain.ledger
    ask(chain, 1, PROMPT[:32], 30)
    before: list[int] = []
    while ledger.retired < 12:
        chain.turn()
        # Launches 1 and 2 prefill 16 tokens each; launch n > 2 forwards the token at position 29 + n.
        forwarded = 16 * min(ledger.retired, 2) + max(0, ledger.retired - 2)
        assert pool.findable == forwarded // 8
        before.append(ledger.launched - ledger.retired)
    assert max(before) >= 1, "launches had been enqueued that filled more"
    assert pool.findable == 5


# ---------------------------------------------------------------- with other parameters


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_prompt_whose_log_probabilities_are_asked_for_is_computed_again(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    ask(chain, 1, PROMPT)
    chain.run()
    chain.submit(2, PROMPT, sampling=SamplingParams(prompt_logprobs=0), max_tokens=5, ignore_eos=True)
    ask(chain, 3, PROMPT)
    chain.run()
    assert [cached(chain, handle) for handle in (1, 2, 3)] == [0, 0, 32]
    assert chain.tokens() == {handle: whole(PROMPT, 5) for handle in (1, 2, 3)}
    assert chain.engine.stats().queried_tokens == 2 * len(PROMPT), "of the second nothing was looked for"


PENALTIES: dict[str, SamplingParams] = {
    "repetition": SamplingParams(seed=3, repetition_penalty=1.5),
    "presence": SamplingParams(seed=3, presence_penalty=0.5),
    "frequency": SamplingParams(seed=3, frequency_penalty=-0.5),
}


@pytest.mark.parametrize("sampling", PENALTIES.values(), ids=PENALTIES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_penalties_count_the_tokens_that_were_found(depth: int, sampling: SamplingParams) -> None:
    chain = make_chain(depth, schedule=no_step, penalty_slots=2)
    ask(chain, 1, PROMPT)
    chain.run()
    chain.submit(2, PROMPT, sampling=sampling, max_tokens=15, ignore_eos=True)
    chain.run()
    assert cached(chain, 2) == 32
    assert chain.tokens()[2] == penalised_completion(PROMPT, sampling, 15)
    chain.check_nothing_is_left()
