"""Every counter of the work, from runs in which it must be a known number."""

from __future__ import annotations

from functools import partial

import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.pressure import (
    LOW_PROMPT,
    SHORTAGE,
    events,
    one_above_another,
    phase_of,
    request_of,
    turn_until_event,
    whole,
)
from tests.runtime.programs.hash_model import penalised_completion

DEPTHS = [0, 1, 2, 4]
AHEAD = [1, 2, 4]


def counts(chain: Chain) -> dict[str, int]:
    """Lifecycle events so far."""
    return {kind: event.count for kind, event in chain.engine.stats().events.items()}


# ---------------------------------------------------------------- events


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_life_without_events_but_its_own(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    chain.submit(1, [3] * 40, max_tokens=10, ignore_eos=True)
    chain.run()
    stats = chain.engine.stats()
    assert counts(chain) == {"admitted": 1, "chunk": 3, "finished": 1}
    assert (stats.submitted, stats.admitted, stats.prefill_chunks) == (1, 1, 3)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.cached_tokens, stats.recomputed_tokens) == (40, 10, 0, 0)
    assert (stats.finished, stats.aborted, stats.void_rows) == ({"LENGTH": 1}, {}, 0)
    # Tokens at positions 40 to 48 are forwarded, the last one by nobody: borders at 40 and 48.
    assert (stats.blocks_reserved, stats.blocks_adopted, stats.blocks_returned) == (2, 2, 0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_eviction_and_a_return_are_counted_once_each(depth: int) -> None:
    chain = one_above_another(depth)
    turn_until_event(chain, "evicted")
    assert chain.engine.stats().running in (1, 2)
    chain.run()
    seen = counts(chain)
    assert (seen["admitted"], seen["evicted"], seen["readmitted"], seen["finished"]) == (2, 1, 1, 2)
    stats = chain.engine.stats()
    assert (stats.submitted, stats.admitted, stats.prompt_tokens) == (2, 2, 22)
    assert stats.generated_tokens == 40
    # Request 1 crosses at 16 and 24; request 2 at 16, and its recompute begins behind it.
    assert stats.blocks_reserved == stats.blocks_adopted
    assert stats.blocks_returned == 0


@pytest.mark.parametrize("depth", AHEAD)
def test_events_of_a_busy_chain_hold_it_on_a_device_that_lags(depth: int) -> None:
    chain = one_above_another(depth)
    chain.run()
    found = chain.engine.stats().events
    assert (found["admitted"].count, found["admitted"].held, found["admitted"].idle) == (2, 0, 2), "at the very start"
    for kind in ("evicted", "readmitted", "finished"):
        event = found[kind]
        assert (event.held, event.idle) == (event.count - (kind == "finished"), 0), kind
    # No launch has followed the last end: it has neither held the chain nor met it idle.


def test_events_of_a_serial_chain_hold_nothing() -> None:
    chain = one_above_another(0)
    chain.run()
    assert counts(chain)["evicted"] == 1
    assert all(event.held == 0 for event in chain.engine.stats().events.values())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_that_arrives_after_idleness_meets_the_chain_idle(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    for handle in (1, 2, 3):
        chain.submit(handle, [3, 4], max_tokens=2, ignore_eos=True)
        chain.run()
        chain.turn()
    found = chain.engine.stats().events["admitted"]
    assert (found.count, found.held, found.idle) == (3, 0, 3)


@pytest.mark.parametrize("depth", DEPTHS)
def test_events_that_no_launch_has_followed_are_counted_and_nothing_more(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    chain.submit(1, [3, 4], max_tokens=50, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    chain.tell(m.Abort(1, ("r1",)))
    chain.engine.intake.take()
    found = chain.engine.stats().events["aborted"]
    assert (found.count, found.held, found.idle) == (1, 0, 0)


# ---------------------------------------------------------------- ended from outside


@pytest.mark.parametrize("depth", [2, 4])
def test_aborts_are_counted_by_phase(depth: int) -> None:
    chain = one_above_another(depth, max_rows=3)
    chain.turn_until(lambda: chain.tokens().get(2))
    chain.submit(3, [5] * 30, max_tokens=9, ignore_eos=True)  # finds no room
    chain.turn()
    assert phase_of(chain, 3) == "WAITING"
    chain.tell(m.Abort(1, ("r3",)))
    turn_until_event(chain, "evicted")
    assert phase_of(chain, 2) == "LEAVING"
    chain.tell(m.Cancel(2))
    chain.turn()
    chain.turn_until(lambda: phase_of(chain, 1) == "DECODE" and not chain.engine.scheduler.holdings.paused)
    chain.tell(m.Abort(1, ("r1",)))
    chain.run()
    stats = chain.engine.stats()
    assert stats.aborted == {"WAITING": 1, "LEAVING": 1, "DECODE": 1}
    assert stats.finished == {"ABORTED": 2, "CANCELLED": 1}
    assert stats.events["aborted"].count == 3


@pytest.mark.parametrize("depth", DEPTHS)
def test_aborts_in_a_prompt_and_of_a_paused_row_are_counted_by_phase(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, num_blocks=1 + 6, run_ahead_tokens=1)
    for handle, length in ((1, 13), (2, 9)):
        chain.submit(handle, [handle + 2] * length, max_tokens=20, ignore_eos=True)
    chain.turn_until(lambda: chain.engine.scheduler.holdings.paused)
    assert phase_of(chain, 1) == "PAUSED"
    chain.tell(m.Abort(1, ("r1", "r2")))
    chain.run()
    chain.submit(3, [5] * 40, max_tokens=5, ignore_eos=True)
    chain.turn_until(lambda: chain.engine.stats().prefill_chunks == 3)
    assert phase_of(chain, 3) == "PREFILL"
    chain.tell(m.Abort(1, ("r3",)))
    chain.run()
    assert chain.engine.stats().aborted == {"PAUSED": 1, "DECODE": 1, "PREFILL": 1}


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_stop_string_is_no_abort(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    chain.submit(1, [3, 4], max_tokens=50, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    chain.tell(m.Cancel(1, FinishReason.STOP))
    chain.run()
    stats = chain.engine.stats()
    assert (stats.aborted, stats.finished) == ({}, {"STOP": 1})
    assert "aborted" not in stats.events
    assert sum(stats.end_to_end.counts) == 1


def test_a_request_whose_client_goes_away_or_that_came_to_no_token_has_no_time_from_end_to_end() -> None:
    chain = make_chain(2, schedule=no_step, max_rows=1)
    chain.submit(1, [3, 4], max_tokens=50, ignore_eos=True)
    chain.submit(2, [3, 4], max_tokens=50, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    chain.tell(m.Abort(1, ("r2",)))
    chain.tell(m.Cancel(1, FinishReason.CANCELLED))
    chain.run()
    stats = chain.engine.stats()
    assert stats.finished == {"CANCELLED": 1, "ABORTED": 1}
    assert (sum(stats.queue.counts), sum(stats.end_to_end.counts)) == (1, 0)


# ---------------------------------------------------------------- tokens and blocks


def has_tokens(chain: Chain, handle: int, count: int) -> bool:
    return len(chain.tokens().get(handle, [])) >= count


@pytest.mark.parametrize("depth", DEPTHS)
def test_cached_and_recomputed_tokens_are_counted_apart(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    prompt = list(range(2, 42))
    for handle in (1, 2):
        chain.submit(handle, prompt, max_tokens=20, ignore_eos=True)
        chain.turn_until(partial(has_tokens, chain, handle, 4))
    request = request_of(chain, 2)
    chain.engine.scheduler.evict(request)
    chain.turn_until(lambda: events(chain, "readmitted"))
    known, shared = request.tokens.size, 8 * request.shared
    assert shared == 40
    chain.run()
    stats = chain.engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (80, 32)
    assert stats.recomputed_tokens == known - 1 - shared
    assert stats.admitted == 2
    assert all(tokens == whole(prompt, 20) for tokens in chain.tokens().values())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_reserved_block_is_adopted_or_returned(depth: int) -> None:
    """A prompt of 13 ends unforeseen with the token of position 16, whose block was reserved."""
    chain = make_chain(depth, schedule=no_step)
    prompt, answer = next(
        ([first] * 13, answer)
        for first in range(2, 60)
        if (answer := whole([first] * 13, 4))[3] not in answer[:3]
    )  # fmt: skip
    chain.submit(1, prompt, max_tokens=30, ignore_eos=True, stop_token_ids=(answer[3],))
    chain.submit(2, LOW_PROMPT, max_tokens=9, ignore_eos=True)  # positions 9 to 17: one border
    chain.run()
    stats = chain.engine.stats()
    assert (stats.blocks_reserved, stats.blocks_adopted, stats.blocks_returned) == (2, 1, 1)
    assert stats.void_rows == max(1, depth)


@pytest.mark.parametrize("depth", DEPTHS)
def test_blocks_and_penalty_slots_are_counted_by_state(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, penalty_slots=3)
    sampling = SamplingParams(presence_penalty=1.0)
    for handle in (1, 2):
        chain.submit(handle, [handle + 2] * 17, sampling=sampling, max_tokens=7, ignore_eos=True)
    chain.submit(3, [9] * 17, max_tokens=7, ignore_eos=True)
    chain.turn_until(lambda: len(chain.tokens()) == 3)
    stats = chain.engine.stats()
    assert (stats.penalty_slots_total, stats.penalty_slots_free, stats.penalty_slots_fenced) == (3, 1, 0)
    assert stats.blocks_owned == 9
    chain.tell(m.Abort(1, ("r1",)))
    chain.engine.intake.take()
    stats = chain.engine.stats()
    assert (stats.penalty_slots_free, stats.penalty_slots_fenced) == (1, 1)
    assert (stats.blocks_owned, stats.blocks_fenced) == (6, 3)
    chain.run()
    stats = chain.engine.stats()
    assert (stats.penalty_slots_free, stats.penalty_slots_fenced) == (3, 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert stats.blocks_cached == 6, "two full blocks each"


def test_penalties_are_refused_where_there_are_no_slots_for_them() -> None:
    chain = make_chain()
    chain.submit(1, [3, 4], sampling=SamplingParams(presence_penalty=1.0), max_tokens=5)
    chain.run()
    assert [(refusal.code, refusal.field) for refusal in chain.refused()] == [("INVALID_ARGUMENT", "sampling")]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_row_waits_for_a_penalty_slot_and_the_chain_goes_on(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, penalty_slots=1)
    tired = {handle: SamplingParams(seed=handle, presence_penalty=1.0) for handle in (1, 2)}
    for handle, sampling in tired.items():
        chain.submit(handle, [handle, 4], sampling=sampling, max_tokens=5, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    assert chain.engine.stats().waiting == 1
    chain.run()
    assert counts(chain)["admitted"] == 2
    assert chain.tokens() == {handle: penalised_completion([handle, 4], tired[handle], 5) for handle in (1, 2)}
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_everything_deferred_is_counted(depth: int) -> None:
    """Of a row that fills one block and ends: that block's findability, its blocks, its slot."""
    chain = make_chain(depth, schedule=no_step)
    chain.submit(1, [3] * 9, max_tokens=3, ignore_eos=True)
    chain.run()
    assert chain.engine.stats().deferred_releases == 3
    assert chain.ledger.fenced == 0


def test_the_shortage_of_these_tests_comes_when_they_say() -> None:
    chain = one_above_another(1)
    turn_until_event(chain, "evicted")
    assert chain.ledger.launched == SHORTAGE
