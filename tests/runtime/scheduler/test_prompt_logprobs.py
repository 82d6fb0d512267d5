"""Log-probabilities of a prompt: all of them, in order, each once, before the first token."""

from __future__ import annotations

import numpy as np
import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams
from tests.cuda_graphs.simulated_device import seeded_schedule
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.pressure import events, phase_of, request_of, whole
from tests.runtime.programs.hash_model import prompt_logprob, prompt_top

DEPTHS = [0, 1, 2, 4]
Described = list[tuple[float, list[tuple[int, float]]]]  # of each token: its own, and the most likely ones


def prompt_of(length: int) -> list[int]:
    return [(11 * i) % 90 + 2 for i in range(length)]


def expected(prompt: list[int], top: int) -> Described:
    return [(prompt_logprob(prompt, place), prompt_top(prompt, place, top)) for place in range(1, len(prompt))]


def parts(chain: Chain, handle: int) -> list[m.PromptLogprobs]:
    """What a request was sent of its prompt. Nothing of it comes after its first token or its end."""
    found: list[m.PromptLogprobs] = []
    over = False
    for _, message in chain.links.sent:
        if isinstance(message, m.Output):
            over |= handle in np.frombuffer(message.handles, np.int64).tolist()
            over |= handle in [end.handle for end in message.finished]
        if isinstance(message, m.PromptLogprobs) and message.handle == handle:
            assert not over, "the prompt's come before the first token"
            found.append(message)
    return found


def described(chain: Chain, handle: int, top: int) -> Described:
    """Of the tokens of a prompt from the second on, without a gap."""
    found: Described = []
    for part in parts(chain, handle):
        assert part.offset == 1 + len(found), "in order, each once"
        chosen = np.frombuffer(part.chosen, np.float32)
        ids = np.frombuffer(part.top_ids, np.int32).reshape(chosen.size, top).tolist()
        most = np.frombuffer(part.top_logprobs, np.float32).reshape(chosen.size, top).tolist()
        for own, its_ids, its_logprobs in zip(chosen.tolist(), ids, most, strict=True):
            found.append((own, list(zip(its_ids, its_logprobs, strict=True))))
    return found


def ask(chain: Chain, handle: int, prompt: list[int], top: int = 2, priority: int = 0, count: int = 5) -> None:
    sampling = SamplingParams(prompt_logprobs=top)
    chain.submit(handle, prompt, sampling=sampling, max_tokens=count, ignore_eos=True, priority=priority)


# ---------------------------------------------------------------- through chunks


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 100])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_prompt_is_described_whole_through_its_chunks(depth: int, length: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    prompt = prompt_of(length)
    ask(chain, 1, prompt)
    chain.run()
    assert described(chain, 1, 2) == expected(prompt, 2)
    assert len(parts(chain, 1)) == (0 if length == 1 else -(-length // 16) - (length % 16 == 1))
    assert chain.tokens()[1] == whole(prompt, 5)
    chain.check_nothing_is_left()


@pytest.mark.parametrize("top", [0, 1, 4])
@pytest.mark.parametrize("depth", DEPTHS)
def test_as_many_of_the_most_likely_ones_as_were_asked_for(depth: int, top: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    ask(chain, 1, prompt_of(20), top)
    chain.run()
    assert described(chain, 1, top) == expected(prompt_of(20), top)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", DEPTHS)
def test_several_prompts_beside_rows_that_decode(depth: int, seed: int) -> None:
    chain = make_chain(depth, schedule=seeded_schedule(seed))
    lengths = {1: 0, 2: 40, 3: 17, 4: 0, 5: 64, 6: 2}
    for handle, length in lengths.items():
        if length:
            ask(chain, handle, [handle, *prompt_of(length)[1:]], top=handle % 3)
        else:
            chain.submit(handle, [handle, 9], max_tokens=40, ignore_eos=True)
        chain.turn()
    chain.run()
    for handle, length in lengths.items():
        if length:
            prompt = [handle, *prompt_of(length)[1:]]
            assert described(chain, handle, handle % 3) == expected(prompt, handle % 3)
            assert chain.tokens()[handle] == whole(prompt, 5)
        else:
            assert parts(chain, handle) == [], "nobody asked"
            assert chain.tokens()[handle] == whole([handle, 9], 40)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_prompt_whose_only_token_ends_the_request_at_once_is_described_first(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    ask(chain, 1, prompt_of(30), count=1)
    chain.run()
    assert described(chain, 1, 2) == expected(prompt_of(30), 2)
    assert len(chain.finished()[1]) == 1


def test_what_is_sent_is_the_same_at_every_depth() -> None:
    sent = []
    for depth in DEPTHS:
        chain = make_chain(depth, schedule=seeded_schedule(depth))
        ask(chain, 1, prompt_of(70))
        chain.run()
        sent.append(parts(chain, 1))
    assert sent[0]
    assert sent == [sent[0]] * len(DEPTHS)


# ---------------------------------------------------------------- interrupted


@pytest.mark.parametrize("launches", [1, 2, 3])
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_an_eviction_between_two_chunks_repeats_nothing_and_leaves_nothing_out(
    depth: int, prefix_cache: bool, launches: int
) -> None:
    chain = make_chain(depth, schedule=no_step, prefix_cache=prefix_cache, max_prefill_tokens=16)
    prompt = prompt_of(70)
    ask(chain, 1, prompt)
    chain.turn_until(lambda: chain.ledger.launched >= launches)
    assert phase_of(chain, 1) == "PREFILL"
    chain.engine.scheduler.evict(request_of(chain, 1))
    chain.run()
    assert events(chain, "readmitted") == 1
    assert described(chain, 1, 2) == expected(prompt, 2)
    assert chain.tokens()[1] == whole(prompt, 5)
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_eviction_for_want_of_blocks_in_a_prompt_repeats_nothing(depth: int) -> None:
    """Request 2 is prefilled slowly, a chunk a launch, and request 1, of a higher priority, grows meanwhile."""
    chain = make_chain(depth, schedule=no_step, num_blocks=1 + 18, prefill_chunk=8, max_prefill_tokens=8)
    chain.submit(1, [3] * 7, max_tokens=100, ignore_eos=True, priority=1)
    chain.turn_until(lambda: len(chain.tokens().get(1, [])) >= 3)
    ask(chain, 2, prompt_of(120))
    chain.turn_until(lambda: events(chain, "evicted"))
    assert 2 not in chain.tokens()
    assert request_of(chain, 2).next_prompt_logprob > 100, "most of it had been sent"
    chain.run()
    assert described(chain, 2, 2) == expected(prompt_of(120), 2)
    assert chain.tokens() == {1: whole([3] * 7, 100), 2: whole(prompt_of(120), 5)}
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_eviction_after_the_prompt_describes_it_no_second_time_and_uses_the_cache(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    prompt = prompt_of(40)
    ask(chain, 1, prompt, count=30)
    chain.turn_until(lambda: len(chain.tokens().get(1, [])) > 3)
    request = request_of(chain, 1)
    chain.engine.scheduler.evict(request)
    chain.turn_until(lambda: events(chain, "readmitted"))
    assert request.shared == 5
    chain.run()
    assert described(chain, 1, 2) == expected(prompt, 2)
    assert chain.tokens()[1] == whole(prompt, 30)


@pytest.mark.parametrize("launches", [1, 2, 3])
@pytest.mark.parametrize("depth", DEPTHS)
def test_an_abort_between_two_chunks_leaves_a_beginning(depth: int, launches: int) -> None:
    chain = make_chain(depth, schedule=no_step, max_prefill_tokens=16)
    prompt = prompt_of(70)
    ask(chain, 1, prompt)
    chain.submit(2, [3, 4], max_tokens=30, ignore_eos=True)
    chain.turn_until(lambda: chain.ledger.launched >= launches)
    chain.tell(m.Abort(1, ("r1",)))
    chain.run()
    said = described(chain, 1, 2)
    assert said == expected(prompt, 2)[: len(said)]
    assert len(said) < len(prompt) - 1
    assert [end.reason for end in chain.finished()[1]] == [FinishReason.ABORTED]
    assert chain.tokens() == {2: whole([3, 4], 30)}
    chain.check_nothing_is_left()


def test_one_of_these_aborts_comes_while_a_chunk_is_in_flight_that_is_then_not_described() -> None:
    chain = make_chain(4, schedule=no_step, max_prefill_tokens=16)
    ask(chain, 1, prompt_of(70))
    chain.turn_until(lambda: chain.ledger.launched >= 3)
    planned = 16 * chain.engine.stats().prefill_chunks
    chain.tell(m.Abort(1, ("r1",)))
    chain.run()
    assert len(described(chain, 1, 2)) < planned
