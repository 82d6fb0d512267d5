"""The scheduler with drafts and with recurrent state: lengths are a range, and a row holds a state slot."""

from __future__ import annotations

import random

import pytest

from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.scheduler.ledger import LedgerError
from runahead.runtime.scheduler.plan_builder import PlanBuilder
from runahead.runtime.wire.parameters import FinishReason
from tests.runtime.chain import tightest_plan
from tests.runtime.scheduler.played import Played, token

DEPTHS = [0, 1, 2, 4]
TIGHT = tightest_plan(8, 16, 8)  # beside a list of eight rows, it has room for four more blocks


def answer(handle: int, length: int, count: int) -> list[int]:
    return [token(handle, position) for position in range(length, length + count)]


def ask_some(played: Played, requests: int, longest: int) -> dict[int, tuple[int, int]]:
    dice = random.Random(played.seed)
    asked = {}
    for handle in range(1, requests + 1):
        length = dice.randint(1, longest)
        asked[handle] = (length, dice.randint(1, longest))
        played.submit(handle, *asked[handle], priority=dice.choice((0, 0, 1)))
        if dice.random() < 0.5:
            played.turn()
    return asked


def check_all(played: Played, asked: dict[int, tuple[int, int]]) -> None:
    assert played.said == {handle: answer(handle, *lengths) for handle, lengths in asked.items()}
    assert sorted(played.ended) == sorted(asked), "each once"
    scheduler = played.scheduler
    assert scheduler.pool.available == scheduler.pool.total
    assert scheduler.rows.free == scheduler.rows.max_rows
    assert scheduler.holdings.state_slots.free == scheduler.holdings.state_slots.total
    counters = scheduler.tally.counters
    assert counters["blocks_reserved"] == counters["blocks_adopted"] + counters["blocks_returned"]


@pytest.mark.parametrize("has_state", [False, True], ids=["attention", "recurrent state"])
@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("depth", DEPTHS)
def test_every_token_is_kept_once_however_many_a_launch_brings(depth: int, drafts: int, has_state: bool) -> None:
    played = Played(drafts, has_state, depth, seed=depth)
    asked = ask_some(played, 8, 60)
    played.run()
    check_all(played, asked)


@pytest.mark.parametrize("has_state", [False, True], ids=["attention", "recurrent state"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", DEPTHS)
def test_rows_with_drafts_pause_and_are_evicted_and_lose_nothing(depth: int, seed: int, has_state: bool) -> None:
    played = Played(3, has_state, depth, blocks=10, seed=seed)
    asked = ask_some(played, 8, 40)
    played.run()
    check_all(played, asked)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", DEPTHS)
def test_launches_with_drafts_are_forms_of_rows_that_all_decode_and_lose_nothing(depth: int, seed: int) -> None:
    """`Played` looks at every plan."""
    played = Played(3, False, depth, blocks=20, seed=seed, draft_rows=2)
    asked = ask_some(played, 8, 40)
    played.run()
    check_all(played, asked)
    kinds = {(plan.drafts, bool(plan.chunks), plan.rows.size > 2) for plan in played.plans if plan.rows.size}
    assert {(3, False, False), (0, True, False), (0, False, True)} <= kinds
    drafts = [plan.drafts for plan in played.plans]
    assert [plan.sample_drafts for plan in played.plans[1:]] == drafts[:-1], "each launch looks at the drafts before it"


def test_a_row_that_begins_takes_the_drafts_from_its_launch() -> None:
    played = Played(3, False, 1, draft_rows=4)
    played.submit(1, 5, 60)
    while not (played.plans and played.plans[-1].drafts):
        played.turn()
    played.submit(2, 5, 60)
    seen = len(played.plans)
    while not any(plan.chunks for plan in played.plans[seen:]):
        played.turn()
    beside = next(plan for plan in played.plans[seen:] if plan.chunks)
    assert beside.drafts == 0 and beside.rows.size == 2 and beside.tokens == 6
    played.run()
    assert played.said == {1: answer(1, 5, 60), 2: answer(2, 5, 60)}


def test_these_rows_were_paused_and_evicted() -> None:
    seen = {"paused": 0, "resumed": 0, "evicted": 0, "readmitted": 0}
    for seed in range(6):
        played = Played(3, False, 4, blocks=10, seed=seed)
        ask_some(played, 8, 40)
        played.run()
        for kind in seen:
            seen[kind] += played.events[kind]
    assert min(seen.values()) > 0, seen


def test_bounds_are_a_range_while_tokens_are_in_flight_and_one_number_after() -> None:
    played = Played(3, run_ahead=4)
    played.submit(1, 10, 100)
    ranges = set()
    for _ in range(12):
        played.turn()
        rows = played.scheduler.rows
        ranges.add(int(rows.most_len[0] - rows.least_len[0]))
    assert max(ranges) == 3 * 3, "three launches in flight, each with three more or not"
    while played.ledger.uncommitted:
        played.commit()
    assert played.scheduler.rows.least_len[0] == played.scheduler.rows.most_len[0] == played.device[0].length


@pytest.mark.parametrize("depth", DEPTHS)
def test_with_recurrent_state_no_prefix_is_found(depth: int) -> None:
    played = Played(0, True, depth)
    for _ in range(2):
        played.submit(1, 40, 5)
        played.run()
    assert played.scheduler.tally.counters["cached_tokens"] == 0
    assert played.scheduler.pool.findable == 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_state_slot_is_given_back_with_the_rows_last_launch(depth: int) -> None:
    played = Played(0, True, depth)
    request = played.submit(1, 5, 50)
    for _ in range(4):
        played.turn()
    slots = played.scheduler.holdings.state_slots
    assert (slots.owned, slots.fenced) == (1, 0)
    in_flight, row_slot = played.ledger.uncommitted, request.row_slot
    is_named = played.scheduler.rows.last_launch[row_slot] > played.ledger.retired
    assert is_named == (depth > 1)
    played.scheduler.stop(request, FinishReason.ABORTED)
    assert (slots.owned, slots.fenced) == (0, 1)
    played.give_back()
    assert slots.fenced == is_named, "launches in flight name it"
    for _ in range(in_flight):
        played.commit()
    played.give_back()
    assert slots.free == slots.total


# ---------------------------------------------------------------- what does not fit a plan


TIGHT = tightest_plan(8, 16, 8)  # beside a list of eight rows, four more blocks


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("depth", DEPTHS)
def test_rows_in_the_tightest_plan_say_all_that_they_have_to_say(depth: int, drafts: int) -> None:
    played = Played(drafts, run_ahead=depth, plan_words=TIGHT, max_rows=8, blocks=80)
    asked = dict.fromkeys(range(1, 9), (9, 60))
    for handle, lengths in asked.items():
        played.submit(handle, *lengths)
    played.run()
    check_all(played, asked)
    assert played.events["paused"] == 0, "it is not blocks that they wait for"


@pytest.mark.parametrize(
    ("plan_words", "crossing"), [(TIGHT, [4, 4]), (PLAN_WORDS, [8, 0])], ids=["tight plan", "wide plan"]
)
def test_of_eight_rows_that_cross_together_as_many_go_on_as_fit_the_plan(plan_words: int, crossing: list[int]) -> None:
    played = Played(run_ahead=1, plan_words=plan_words, max_rows=8, blocks=80)
    asked = {}
    for handle in range(1, 9):  # each a token longer and a launch later than the one before: all at the same position
        asked[handle] = (handle, 30)
        played.submit(handle, *asked[handle])
        played.turn()
    played.turn()
    played.turn()
    assert [plan.appends.shape[0] for plan in played.plans[8:10]] == crossing
    assert [plan.rows.size for plan in played.plans[8:10]] == [crossing[0], 8]
    assert played.events["paused"] == 0
    played.run()
    check_all(played, asked)


def test_an_admission_that_was_measured_wrongly_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played()
    played.submit(1, 10, 5)
    measured: list[int] = []

    def fits_once(builder: PlanBuilder, tokens: int, blocks: int, record_words: int) -> bool:
        measured.append(tokens)
        return len(measured) == 1

    monkeypatch.setattr(PlanBuilder, "fits", fits_once)
    with pytest.raises(LedgerError, match="does not fit the plan that was measured for it"):
        played.scheduler.plan()
    assert measured == [10, 10]
