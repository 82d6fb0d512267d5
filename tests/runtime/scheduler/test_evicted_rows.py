"""What becomes of a row that was told to leave: its tokens in flight, its ends, its return."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.pressure import (
    HIGH_PROMPT,
    LOW_PROMPT,
    SHORTAGE,
    events,
    one_above_another,
    phase_of,
    request_of,
    turn_until_event,
    two_of_a_kind,
    whole,
)
from tests.runtime.programs.hash_model import penalised_completion

DEPTHS = [0, 1, 2, 4]
ABORT_LOW = m.Abort(1, ("r2",))


def in_flight(chain: Chain, handle: int) -> int:
    """Tokens of a row that launches sample whose results the host has not seen, the one that is owed included."""
    slot = request_of(chain, handle).row_slot
    ledger = chain.ledger
    launches = [launch for launch in ledger.launches() if launch.number > ledger.committed]
    sampled = sum(int((launch.sample_slots[launch.samples] == slot).sum()) for launch in launches)
    slots, _, samples = ledger.last_rows()
    return sampled + int((slots[samples] == slot).sum())


# ---------------------------------------------------------------- tokens in flight


@pytest.mark.parametrize("depth", [2, 4])
def test_tokens_in_flight_of_a_leaving_row_are_kept_once(depth: int) -> None:
    chain = one_above_another(depth)
    turn_until_event(chain, "evicted")
    assert phase_of(chain, 2) == "LEAVING"
    said, flying = len(chain.tokens()[2]), in_flight(chain, 2)
    assert flying == depth - 1, "those of the launches that were queued before it was told to leave"
    chain.turn_until(lambda: phase_of(chain, 2) == "WAITING")
    assert chain.tokens()[2] == whole(LOW_PROMPT, said + flying)
    assert request_of(chain, 2).tokens.tolist() == LOW_PROMPT + whole(LOW_PROMPT, said + flying)
    chain.run()
    assert chain.tokens()[2] == whole(LOW_PROMPT, 20)
    assert chain.engine.stats().void_rows == 0
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_leaving_row_is_not_admitted_before_its_tokens_are_committed(depth: int) -> None:
    """There is room for it at once: only its own tokens keep it."""
    chain = one_above_another(depth, max_rows=8)
    chain.turn_until(lambda: chain.ledger.launched == 6)
    scheduler, request = chain.engine.scheduler, request_of(chain, 2)
    newest = chain.ledger.launched + chain.ledger.owes_a_launch
    scheduler.evict(request)
    assert phase_of(chain, 2) == "LEAVING"
    while chain.ledger.committed < newest:
        assert request not in scheduler.waiting
        assert events(chain, "readmitted") == 0
        chain.turn()
    chain.turn_until(lambda: events(chain, "readmitted"))
    assert request.tokens.tolist() == LOW_PROMPT + whole(LOW_PROMPT, newest - 1), (
        "one token of each launch but the first"
    )
    chain.run()
    assert events(chain, "readmitted") == 1
    assert chain.tokens() == {1: whole(HIGH_PROMPT, 20), 2: whole(LOW_PROMPT, 20)}


def stops_at(index: int) -> Callable[[Chain], None]:
    """Asks for request 2, to end unforeseen with the token of this index."""
    answer = whole(LOW_PROMPT, 20)
    assert answer[index] not in answer[:index]
    return lambda chain: chain.submit(
        2, LOW_PROMPT, max_tokens=20, ignore_eos=True, stop_token_ids=(answer[index],), request_id="r2"
    )


@pytest.mark.parametrize("depth", [2, 4])
def test_a_leaving_row_ends_with_a_token_that_was_in_flight(depth: int) -> None:
    last = SHORTAGE - 2  # sampled by the launch for which it was told to leave, the last that names it
    chain = one_above_another(depth, stops_at(last))
    turn_until_event(chain, "evicted")
    assert phase_of(chain, 2) == "LEAVING"
    assert len(chain.tokens()[2]) <= last, "its end was not known"
    chain.run()
    assert events(chain, "evicted") == 1
    assert events(chain, "readmitted") == 0
    assert chain.engine.stats().recomputed_tokens == 0
    assert chain.tokens()[2] == whole(LOW_PROMPT, last + 1)
    assert [end.reason for end in chain.finished()[2]] == [FinishReason.STOP]
    chain.check_nothing_is_left()


# ---------------------------------------------------------------- ended from outside


@pytest.mark.parametrize("depth", [2, 4])
def test_abort_of_a_leaving_row(depth: int) -> None:
    chain = one_above_another(depth)
    turn_until_event(chain, "evicted")
    assert phase_of(chain, 2) == "LEAVING"
    said = len(chain.tokens()[2])
    chain.tell(ABORT_LOW)
    chain.run()
    assert chain.engine.stats().aborted == {"LEAVING": 1}
    assert len(chain.tokens()[2]) == said, "what was in flight is void"
    assert chain.engine.stats().void_rows == depth - 1
    assert events(chain, "readmitted") == 0
    assert [end.reason for end in chain.finished()[2]] == [FinishReason.ABORTED]
    assert chain.tokens()[1] == whole(HIGH_PROMPT, 20)
    chain.check_nothing_is_left()


def ask_as_high(chain: Chain) -> None:
    """Request 2, of the same priority as request 1."""
    chain.submit(2, LOW_PROMPT, priority=1, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("depth", DEPTHS)
def test_abort_of_a_paused_row_gives_its_blocks_to_the_others(depth: int) -> None:
    """Request 2 goes on without a border ahead while request 1, of the same priority, waits for a block."""
    chain = one_above_another(depth, ask_as_high)
    chain.turn_until(lambda: chain.engine.scheduler.holdings.paused)
    assert phase_of(chain, 1) == "PAUSED"
    said = len(chain.tokens()[1])
    chain.tell(m.Abort(1, ("r1",)))
    chain.run()
    assert chain.engine.stats().aborted == {"PAUSED": 1}
    assert chain.engine.stats().paused == 0
    assert len(chain.tokens()[1]) == said
    assert events(chain, "evicted") == 0, "what it held was enough"
    assert chain.finished()[1][0].reason == FinishReason.ABORTED
    assert chain.tokens()[2] == whole(LOW_PROMPT, 20)
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_abort_of_a_row_that_was_evicted_and_waits(depth: int) -> None:
    chain = one_above_another(depth)
    chain.turn()
    chain.turn_until(lambda: phase_of(chain, 2) == "WAITING")
    assert events(chain, "evicted") == 1
    said = chain.tokens()[2]
    assert said == whole(LOW_PROMPT, len(said))
    chain.tell(ABORT_LOW)
    chain.run()
    assert chain.engine.stats().aborted == {"WAITING": 1}
    assert chain.tokens()[2] == said
    assert events(chain, "readmitted") == 0
    assert [end.reason for end in chain.finished()[2]] == [FinishReason.ABORTED]
    chain.check_nothing_is_left()


# ---------------------------------------------------------------- recomputed


@pytest.mark.parametrize("depth", DEPTHS)
def test_without_the_prefix_cache_all_that_was_computed_is_recomputed_and_counted(depth: int) -> None:
    chain = one_above_another(depth, prefix_cache=False)
    chain.turn()
    chain.turn_until(lambda: phase_of(chain, 2) == "WAITING")
    known = request_of(chain, 2).tokens.size
    assert known > len(LOW_PROMPT)
    chain.run()
    stats = chain.engine.stats()
    assert (stats.recomputed_tokens, stats.cached_tokens) == (known - 1, 0), "the last token is computed for once"
    assert (stats.admitted, stats.events["readmitted"].count) == (2, 1)
    assert chain.tokens()[2] == whole(LOW_PROMPT, 20)


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_had_not_been_computed_is_not_recomputed(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, prefix_cache=False, max_prefill_tokens=16)
    chain.submit(1, [3] * 100, max_tokens=5, ignore_eos=True)
    chain.turn()
    request, chunks = request_of(chain, 1), chain.engine.stats().prefill_chunks
    assert phase_of(chain, 1) == "PREFILL"
    chain.engine.scheduler.evict(request)
    chain.run()
    assert chain.engine.stats().recomputed_tokens == 16 * chunks < 100
    assert chain.tokens()[1] == whole([3] * 100, 5)


@pytest.mark.parametrize("depth", DEPTHS)
def test_blocks_that_are_still_cached_are_not_recomputed(depth: int) -> None:
    chain = one_above_another(depth)
    chain.turn()
    chain.turn_until(lambda: phase_of(chain, 2) == "WAITING")
    request = request_of(chain, 2)
    known = request.tokens.size
    chain.turn_until(lambda: phase_of(chain, 2) != "WAITING")
    cached = 8 * request.shared
    assert 0 < cached < known
    chain.run()
    assert chain.engine.stats().recomputed_tokens == known - 1 - cached
    assert chain.tokens() == {1: whole(HIGH_PROMPT, 20), 2: whole(LOW_PROMPT, 20)}
    (end,) = chain.finished()[2]
    assert end.cached_tokens == 0, "nothing of its prompt was cached when it was first admitted"
    assert chain.engine.stats().cached_tokens == 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_two_rows_of_a_kind_are_both_right_after_one_was_recomputed(depth: int) -> None:
    chain = two_of_a_kind(depth, prefix_cache=False)
    chain.run()
    stats = chain.engine.stats()
    assert stats.events["evicted"].count == sum(end.evictions for (end,) in chain.finished().values()) == 1
    assert stats.recomputed_tokens > 13
    assert chain.tokens() == {handle: whole([handle + 2] * 13, 20) for handle in (1, 2)}


# ---------------------------------------------------------------- penalties

FIRST = SamplingParams(seed=5, repetition_penalty=1.3, frequency_penalty=0.5)
SECOND = SamplingParams(seed=6, presence_penalty=0.75)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_penalised_row_is_evicted_and_another_admitted_into_its_slots(depth: int) -> None:
    chain = one_above_another(
        depth,
        lambda chain: chain.submit(2, LOW_PROMPT, sampling=FIRST, max_tokens=20, ignore_eos=True),
        penalty_slots=1,
    )
    chain.turn()
    first = request_of(chain, 2)
    slots = (first.row_slot, first.penalty_slot)
    turn_until_event(chain, "evicted")
    chain.submit(3, [6, 7], sampling=SECOND, max_tokens=6, ignore_eos=True, priority=1)
    chain.turn_until(lambda: chain.is_running("r3"))
    second = request_of(chain, 3)
    assert (second.row_slot, second.penalty_slot) == slots
    assert phase_of(chain, 2) == "WAITING"
    chain.run()
    assert chain.tokens() == {
        1: whole(HIGH_PROMPT, 20),
        2: penalised_completion(LOW_PROMPT, FIRST, 20),
        3: penalised_completion([6, 7], SECOND, 6),
    }
    assert events(chain, "readmitted") == 1
    chain.check_nothing_is_left()


def test_the_oracle_of_this_test_sees_another_rows_counts() -> None:
    said = penalised_completion(LOW_PROMPT, FIRST, 20)
    assert said != whole(LOW_PROMPT, 20)
    without_prompt = SamplingParams(seed=5, frequency_penalty=0.5)
    assert penalised_completion(LOW_PROMPT, without_prompt, 20) != said
