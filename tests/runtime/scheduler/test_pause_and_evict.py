"""Blocks run out: rows pause, and one is evicted where nothing else could free any."""

from __future__ import annotations

from itertools import pairwise

import pytest

from runahead.runtime.scheduler.ledger import LedgerError
from runahead.runtime.scheduler.plan_builder import Planned
from runahead.runtime.scheduler.request import Request
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
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

DEPTHS = [0, 1, 2, 4]
AHEAD = [1, 2, 4]  # where a row that has ended is still named by launches in flight


def coming_blocks(depth: int) -> Chain:
    """Requests 1 and 2 lack a block each at SHORTAGE; those of 3, which has just ended unforeseen, are coming."""
    chain = make_chain(depth, schedule=no_step, num_blocks=1 + 8)
    for handle in (1, 2):
        chain.submit(handle, [handle + 2] * 13, max_tokens=20, ignore_eos=True)
    last = SHORTAGE - depth - 2  # of its tokens, sampled so late that it is in every launch before the shortage
    stop = whole([5] * 5, 20)[last]
    assert stop not in whole([5] * 5, 20)[:last]
    chain.submit(3, [5] * 5, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    return chain


@pytest.mark.parametrize("depth", AHEAD)
def test_all_rows_pause_and_go_on_where_they_were(depth: int) -> None:
    chain = coming_blocks(depth)
    chain.turn_until(lambda: len(chain.engine.scheduler.holdings.paused) == 2)
    assert chain.ledger.launched == SHORTAGE
    assert [phase_of(chain, handle) for handle in (1, 2)] == ["PAUSED", "PAUSED"]
    assert len(chain.engine.scheduler.holdings.requests()) == chain.engine.stats().paused == 2
    chain.run()
    stats = chain.engine.stats()
    assert {kind: stats.events[kind].count for kind in ("paused", "resumed")} == {"paused": 2, "resumed": 2}
    assert [chain.tokens()[handle] for handle in (1, 2)] == [whole([handle + 2] * 13, 20) for handle in (1, 2)]
    assert chain.finished()[3][0].reason == FinishReason.STOP
    told = {handle: (end.pauses, end.evictions) for handle, (end,) in chain.finished().items()}
    assert told == {1: (1, 0), 2: (1, 0), 3: (0, 0)}
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", AHEAD)
def test_nobody_is_evicted_while_what_is_free_and_what_is_coming_cover_the_need(depth: int) -> None:
    chain = coming_blocks(depth)
    turn_until_event(chain, "paused")
    pool = chain.engine.scheduler.pool
    assert pool.available + pool.fenced == 2, "those of the one that has ended"
    chain.run()
    assert events(chain, "evicted") == 0


@pytest.mark.parametrize("depth", AHEAD)
def test_a_row_that_paused_recomputes_nothing(depth: int) -> None:
    chain = coming_blocks(depth)
    chain.run()
    stats = chain.engine.stats()
    assert stats.events["paused"].count == 2
    assert (stats.recomputed_tokens, stats.prefill_chunks, stats.admitted) == (0, 3, 3)


@pytest.mark.parametrize("depth", DEPTHS)
def test_of_rows_that_all_wait_the_youngest_is_evicted(depth: int) -> None:
    chain = two_of_a_kind(depth)
    turn_until_event(chain, "evicted")
    assert phase_of(chain, 1) in ("PAUSED", "DECODE"), "the older one waits for what the younger gives up"
    assert phase_of(chain, 2) in ("LEAVING", "WAITING")
    chain.run()
    assert events(chain, "evicted") == 1
    assert chain.tokens() == {handle: whole([handle + 2] * 13, 20) for handle in (1, 2)}
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_of_rows_that_all_wait_the_youngest_of_the_lowest_priority_is_evicted(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, num_blocks=1 + 9)
    for handle, priority in ((1, 1), (2, 0), (3, 0), (4, 1)):
        chain.submit(handle, [handle + 2] * 5, max_tokens=20, ignore_eos=True, priority=priority)
    turn_until_event(chain, "evicted")
    assert [phase_of(chain, 3) in ("LEAVING", "WAITING"), events(chain, "evicted")] == [True, 1]
    chain.run()
    assert chain.tokens() == {handle: whole([handle + 2] * 5, 20) for handle in range(1, 5)}
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_row_of_a_higher_priority_takes_the_blocks_of_one_that_runs(depth: int) -> None:
    chain = one_above_another(depth)
    chain.turn()
    before: list[str] = []
    while not events(chain, "evicted"):
        before = [phase_of(chain, handle) for handle in (1, 2)]
        chain.turn()
    assert before == ["DECODE", "DECODE"], "nobody had paused"
    assert chain.ledger.launched == SHORTAGE
    assert phase_of(chain, 2) in ("LEAVING", "WAITING")
    chain.run()
    assert events(chain, "evicted") == 1
    assert chain.tokens() == {1: whole(HIGH_PROMPT, 20), 2: whole(LOW_PROMPT, 20)}
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_row_of_the_same_priority_waits_for_one_that_runs_to_need_a_block_too(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, num_blocks=1 + 6)
    chain.submit(1, HIGH_PROMPT, max_tokens=20, ignore_eos=True)
    chain.submit(2, LOW_PROMPT, max_tokens=20, ignore_eos=True)
    chain.turn_until(lambda: chain.engine.scheduler.holdings.paused)
    said = len(chain.tokens()[2])
    assert phase_of(chain, 1) == "PAUSED"
    assert events(chain, "evicted") == 0
    turn_until_event(chain, "evicted")
    assert len(chain.tokens()[2]) > said, "the other went on"
    assert request_of(chain, 1).evictions == 0
    chain.run()
    assert chain.tokens() == {1: whole(HIGH_PROMPT, 20), 2: whole(LOW_PROMPT, 20)}


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_eviction_empties_the_paused_set(depth: int) -> None:
    chain = two_of_a_kind(depth)
    turn_until_event(chain, "evicted")
    assert 2 not in [r.handle for r in paused_requests(chain)], "who is evicted is not paused any more"
    chain.turn_until(lambda: not chain.engine.scheduler.holdings.paused)
    assert phase_of(chain, 1) == "DECODE"
    said = len(chain.tokens()[1])
    chain.turn_until(lambda: len(chain.tokens()[1]) > said + depth)
    chain.run()
    assert events(chain, "paused") == 2
    assert events(chain, "resumed") == 1
    assert chain.engine.stats().paused == 0
    assert chain.tokens() == {handle: whole([handle + 2] * 13, 20) for handle in (1, 2)}


def paused_requests(chain: Chain) -> list[Request]:
    scheduler = chain.engine.scheduler
    return [request for slot in scheduler.holdings.paused if (request := scheduler.holdings.by_slot[slot]) is not None]


def prompts_with_a_new_token(index: int, count: int) -> list[list[int]]:
    """Prompts of 13 whose answers' token at `index` is not among those before it, so that it may be a stop id."""
    prompts = [[first] * 13 for first in range(2, 60)]
    return [prompt for prompt in prompts if (answer := whole(prompt, 9))[index] not in answer[:index]][:count]


@pytest.mark.parametrize("ends", ["at max_tokens", "unforeseen"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_all_rows_finish_in_one_launch(depth: int, ends: str) -> None:
    chain = make_chain(depth, schedule=no_step, num_blocks=1 + 12, max_rows=3, max_prefill_tokens=64)
    prompts = dict(enumerate(prompts_with_a_new_token(8, 5), start=1))
    for handle, prompt in prompts.items():
        stop = (whole(prompt, 9)[8],) if ends == "unforeseen" else ()
        count = 20 if ends == "unforeseen" else 9
        chain.submit(handle, prompt, max_tokens=count, ignore_eos=True, stop_token_ids=stop)
    chain.run()
    last = [{end.handle for end in output.finished} for output in chain.outputs() if output.finished]
    assert last[0] == {1, 2, 3}, "in one launch"
    assert last[1] == {4, 5}, "admitted in one launch too"
    assert chain.tokens() == {handle: whole(prompt, 9) for handle, prompt in prompts.items()}
    assert events(chain, "finished") == 5
    assert chain.engine.stats().void_rows == (5 * max(depth, 1) if ends == "unforeseen" else 0)
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_finished_requests_neighbour_is_evicted_in_the_same_plan(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request frees by its end goes to two of three rows; the third takes a lower neighbour's blocks."""
    chain = make_chain(depth, schedule=no_step, num_blocks=1 + 13, max_prefill_tokens=64)
    scheduler = chain.engine.scheduler
    seen: list[tuple[int, int]] = []  # requests finished and rows evicted, at every plan
    plan = scheduler.plan

    def watched_plan() -> Planned | None:
        planned = plan()
        evicted = 0 if planned is None else planned.events.get("evicted", 0)
        seen.append((sum(scheduler.tally.finished.values()), evicted))
        return planned

    monkeypatch.setattr(scheduler, "plan", watched_plan)
    for handle in (1, 2, 3):
        chain.submit(handle, [handle + 2] * 13, max_tokens=20, ignore_eos=True, priority=1)
    chain.submit(4, [7] * 3, max_tokens=20, ignore_eos=True)
    # Its last token is committed just before the plan for which the blocks of the others do not suffice.
    chain.submit(5, [8] * 5, max_tokens=SHORTAGE - max(depth, 1) - 1, ignore_eos=True)
    chain.run()
    plans = [now for before, now in pairwise(seen) if now[0] > before[0] and now[1]]
    assert plans == [(1, 1)], "one plan follows the first end and evicts"
    assert events(chain, "evicted") == 1
    for handle in (1, 2, 3):
        assert chain.tokens()[handle] == whole([handle + 2] * 13, 20)
    assert chain.tokens()[4] == whole([7] * 3, 20)
    chain.check_nothing_is_left()


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"), [(33, 1, "prompt"), (20, 14, "stopping.max_tokens"), (32, 1, ""), (20, 13, "")]
)
def test_a_request_that_could_never_fit_is_refused(prompt: int, max_tokens: int, field: str) -> None:
    chain = make_chain(num_blocks=1 + 4)  # 32 tokens; the last token of a completion needs no place
    chain.submit(1, [3] * prompt, max_tokens=max_tokens, ignore_eos=True)
    chain.run()
    if field:
        assert [(refusal.code, refusal.field) for refusal in chain.refused()] == [("INVALID_ARGUMENT", field)]
        assert "the KV cache holds 32" in chain.refused()[0].message
        assert chain.links.sent == [(1, chain.refused()[0])]
    else:
        assert chain.refused() == []
        assert chain.tokens()[1] == whole([3] * prompt, max_tokens)
    chain.tell(m.StatsQuery(1))
    chain.turn()
    assert chain.engine.stats().submitted == (not field)


def test_work_that_waits_for_nothing_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain()
    monkeypatch.setattr(chain.engine.scheduler, "plan", lambda: None)
    chain.submit(1, [3, 4], max_tokens=5)
    with pytest.raises(LedgerError, match="nothing is in flight and 1 requests wait"):
        chain.turn()
