"""Requests that end from outside: aborted, cancelled, or with their front end."""

from __future__ import annotations

import pytest

from runahead.runtime.engine import live_requests
from runahead.runtime.engine.live_requests import EARLY_ABORT_S
from runahead.runtime.scheduler.rows import RowPhase
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.programs.hash_model import completion

DEPTHS = [0, 1, 2, 3, 4]
INTERRUPTIONS = {"abort": m.Abort(1, ("r1",)), "cancel": m.Cancel(1), "lost front end": None}


def between_two_chunks(chain: Chain) -> bool:
    """Request 1 has planned a part of its prompt, and nothing is in flight."""
    if not chain.is_running("r1") or chain.ledger.in_flight:
        return False
    rows, slot = chain.engine.scheduler.rows, chain.slot_of("r1")
    return bool(rows.phase[slot] == RowPhase.PREFILL and rows.least_len[slot] > 0)


@pytest.mark.parametrize("what", INTERRUPTIONS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_an_end_between_two_prefill_chunks_lets_in_the_request_that_waits_for_the_slot(depth: int, what: str) -> None:
    chain = make_chain(depth, max_rows=1, run_ahead_tokens=1)
    chain.submit(1, [3] * 60, max_tokens=3)
    chain.submit(2, [4, 5], owner=2, seed=9, max_tokens=3)
    chain.turn_until(lambda: between_two_chunks(chain))
    assert not chain.is_running("r2.2")
    chain.tell(INTERRUPTIONS[what])
    chain.run()
    assert chain.tokens(owner=2)[2] == completion([4, 5], 9, 3)
    assert 1 not in chain.tokens()
    assert [end.reason for end in chain.finished().get(1, [])] == [FinishReason.ABORTED] * (what == "abort")
    chain.check_nothing_is_left()


@pytest.mark.parametrize("what", INTERRUPTIONS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_an_end_between_two_prefill_chunks_lets_in_the_request_that_waits_for_blocks(depth: int, what: str) -> None:
    chain = make_chain(depth, num_blocks=17, run_ahead_tokens=1)
    chain.submit(1, [3] * 100, max_tokens=20)
    chain.submit(2, [4] * 100, owner=2, max_tokens=3)
    chain.turn_until(lambda: between_two_chunks(chain))
    assert not chain.is_running("r2.2")
    chain.tell(INTERRUPTIONS[what])
    chain.run()
    assert chain.tokens(owner=2)[2] == completion([4] * 100, 0, 3)
    chain.check_nothing_is_left()


@pytest.mark.parametrize("what", INTERRUPTIONS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_an_end_of_a_row_in_flight_gives_its_blocks_back_when_its_launches_have_retired(depth: int, what: str) -> None:
    chain = make_chain(depth, schedule=no_step)
    chain.submit(1, [3] * 20, max_tokens=90, ignore_eos=True)
    chain.submit(2, [4] * 20, owner=2, max_tokens=40, ignore_eos=True)
    chain.turn_until(lambda: len(chain.tokens().get(1, [])) > 5)
    chain.tell(INTERRUPTIONS[what])
    before = len(chain.tokens()[1])
    chain.run()
    assert len(chain.tokens()[1]) == before
    assert chain.tokens(owner=2)[2] == completion([4] * 20, 0, 40, stops=())
    assert chain.engine.stats().void_rows > 0, "tokens of the row were in flight when it ended"
    chain.check_nothing_is_left()


def test_an_end_from_outside_is_counted_under_its_reason() -> None:
    chain = make_chain()
    for handle in range(1, 5):
        chain.submit(handle, [handle, 4], max_tokens=50, ignore_eos=True)
    chain.submit(5, [5, 4], owner=2, max_tokens=50, ignore_eos=True)
    chain.turn_until(lambda: len(chain.tokens()) == 4)
    chain.tell(m.Cancel(1))
    chain.tell(m.Cancel(2, FinishReason.STOP))
    chain.tell(m.Abort(1, ("r3",)))
    chain.tell(None, owner=2)
    chain.run()
    assert chain.engine.stats().finished == {"CANCELLED": 2, "STOP": 1, "ABORTED": 1, "LENGTH": 1}


def test_a_terminal_says_nothing_of_parts_that_its_request_did_not_come_to() -> None:
    chain = make_chain(max_rows=1, clock=iter(range(1000)).__next__)
    chain.submit(1, [3] * 60, max_tokens=5)
    chain.submit(2, [4, 5], max_tokens=5)
    chain.turn_until(lambda: between_two_chunks(chain))
    chain.tell(m.Abort(1, ("r1", "r2")))
    chain.run()
    (prefilling,), (waiting,) = chain.finished()[1], chain.finished()[2]
    assert prefilling.queue_s > 0
    assert (prefilling.prefill_s, prefilling.first_token_s, prefilling.decode_s) == (-1, -1, -1)
    assert (waiting.queue_s, waiting.prefill_s, waiting.first_token_s, waiting.decode_s) == (-1, -1, -1, -1)


def test_an_abort_says_what_it_found() -> None:
    chain = make_chain()
    chain.submit(1, [3, 4], max_tokens=5)
    chain.run()
    chain.submit(2, [3, 4], max_tokens=50, ignore_eos=True)
    chain.tell(m.Abort(8, ("r1", "r2", "nobody")))
    chain.run()
    (result,) = [message for _, message in chain.links.sent if isinstance(message, m.AbortResult)]
    assert (result.call, result.outcomes) == (8, ("ALREADY_FINISHED", "ABORTED", "NOT_FOUND"))


def test_abort_of_all_ends_every_request_whoever_sent_it() -> None:
    chain = make_chain(max_rows=2)
    for handle in range(1, 5):
        chain.submit(handle, [handle, 4], owner=1 + handle % 2, max_tokens=50, ignore_eos=True)
    chain.turn()
    chain.tell(m.Abort(8, (), True))
    chain.run()
    reasons = [end.reason for owner in (1, 2) for ends in chain.finished(owner).values() for end in ends]
    assert reasons == [FinishReason.ABORTED] * 4


def test_abort_of_all_reaches_ids_that_begin_as_it_says_and_no_others() -> None:
    chain = make_chain(max_rows=2)
    ids = {1: "alice/r1", 2: "bob/r1", 3: "alice/r2", 4: "bob/alice/r1"}
    for handle, request_id in ids.items():  # two have rows, two wait
        chain.submit(handle, [handle, 4], request_id=request_id, max_tokens=5, ignore_eos=True)
    chain.turn()
    chain.tell(m.Abort(8, (), True, "alice/"))
    chain.run()
    (result,) = [message for _, message in chain.links.sent if isinstance(message, m.AbortResult)]
    assert (result.request_ids, result.outcomes) == (("alice/r1", "alice/r2"), ("ABORTED", "ABORTED"))
    reasons = {handle: [end.reason for end in ends] for handle, ends in chain.finished().items()}
    assert reasons == {
        handle: [FinishReason.ABORTED if request_id.startswith("alice/") else FinishReason.LENGTH]
        for handle, request_id in ids.items()
    }


def test_what_one_caller_aborts_and_ends_makes_nobody_else_s_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_requests, "MAX_REMEMBERED", most := 16)
    chain = make_chain()
    chain.submit(1, [3, 4], request_id="bob/done", max_tokens=5)
    chain.run()
    chain.tell(m.Abort(1, ("bob/late",)))
    chain.tell(m.Abort(2, tuple(f"alice/{count}" for count in range(2 * most))))
    for handle in range(3, 3 + 2 * most):
        chain.submit(handle, [3, 4], request_id=f"alice/r{handle}", max_tokens=1)
        chain.run()
    chain.submit(2, [3, 4], request_id="bob/late", max_tokens=5)
    chain.tell(m.Abort(3, ("bob/done",)))
    chain.run()
    assert [end.reason for end in chain.finished()[2]] == [FinishReason.ABORTED]
    results = [message for _, message in chain.links.sent if isinstance(message, m.AbortResult)]
    assert results[-1].outcomes == ("ALREADY_FINISHED",)


@pytest.mark.parametrize(("later_s", "aborted"), [(EARLY_ABORT_S - 1, True), (EARLY_ABORT_S + 1, False)])
def test_an_abort_that_came_before_its_request_is_forgotten_after_a_while(later_s: float, aborted: bool) -> None:
    now = 1000.0
    chain = make_chain(clock=lambda: now)
    chain.tell(m.Abort(1, ("late",)))
    chain.turn()
    now += later_s
    chain.submit(1, [3, 4], request_id="late", max_tokens=5)
    chain.run()
    assert (chain.finished()[1][0].reason == FinishReason.ABORTED) == aborted
    assert (chain.tokens() == {}) == aborted


def test_an_abort_that_came_before_its_request_counts_for_that_one_even_if_it_is_refused() -> None:
    chain = make_chain()
    chain.tell(m.Abort(1, ("late",)))
    chain.submit(1, [3] * 500, request_id="late", max_tokens=5)
    chain.run()
    assert [refusal.code for refusal in chain.refused()] == ["INVALID_ARGUMENT"]
    chain.submit(2, [3, 4], request_id="late", max_tokens=5, ignore_eos=True)
    chain.run()
    assert [end.reason for end in chain.finished()[2]] == [FinishReason.LENGTH], "nobody aborted this one"


def test_a_request_aborted_before_it_came_is_told_so_where_others_are_told_to_try_again() -> None:
    """Tried again, it would be served."""
    chain = make_chain(max_rows=1, max_queue=1, schedule=no_step)
    chain.submit(1, [3, 4], max_tokens=50, ignore_eos=True)
    chain.turn_until(lambda: chain.is_running("r1"))
    chain.tell(m.Abort(1, ("late",)))
    for handle, request_id in ((2, "waits"), (3, "late"), (4, "too many")):
        chain.submit(handle, [3, 4], request_id=request_id, max_tokens=5, ignore_eos=True)
    chain.run()
    assert [(refusal.handle, refusal.code) for refusal in chain.refused()] == [(4, "RESOURCE_EXHAUSTED")]
    reasons = {handle: [end.reason for end in ends] for handle, ends in chain.finished().items()}
    assert reasons == {1: [FinishReason.LENGTH], 2: [FinishReason.LENGTH], 3: [FinishReason.ABORTED]}
    assert 3 not in chain.tokens()
