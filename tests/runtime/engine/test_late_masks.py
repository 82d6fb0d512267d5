"""Rows with a grammar whose masks come late: held, and then the tokens that they would have had at once."""

from __future__ import annotations

import random
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest

from runahead.cuda_graphs.rings import FORCED
from runahead.runtime.engine.row_check import check_rows
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams
from tests.cuda_graphs.simulated_device import seeded_schedule
from tests.runtime.chain import Chain, tell_of_marks_one_by_one
from tests.runtime.late_masks import LateMasks, make_masked_chain

DEPTHS = (0, 1, 2, 4)
# What grammars force is drafted with any drafter and with none, and more of it than the drafter may guess, or as much.
DRAFTS: dict[str, dict[str, int]] = {
    "nothing": {},
    "forced": {"forced_drafts": 5},
    "guessed": {"drafts": 3, "forced_drafts": 3},
    "more forced than guessed": {"drafts": 1, "forced_drafts": 6},
}
TIGHT: dict[str, Any] = {"num_blocks": 13, "block_size": 4, "context_length": 40, "prefill_chunk": 8}


def submit_some(chain: Chain, seed: int) -> None:
    """Twelve requests, of which about half have a grammar; some are greedy, some end by their length."""
    dice = random.Random(seed)
    for handle in range(1, 13):
        sampling = SamplingParams(
            seed=dice.randrange(1 << 40),
            temperature=dice.choice((0.0, 1.0)),
            logprobs=dice.choice((-1, -1, 2)),
        )
        chain.submit(
            handle,
            [dice.randrange(2, 97) for _ in range(dice.randrange(1, 14))],
            sampling=sampling,
            structure=dice.choice(("", f"any {dice.randrange(1, 20)}", "shared 9", f"some {dice.randrange(1, 20)}")),
            max_tokens=dice.randrange(1, 24),
            min_tokens=0,
        )


def told(chain: Chain) -> tuple[dict[int, list[int]], dict[int, int]]:
    return chain.tokens(), {handle: ends[0].reason for handle, ends in chain.finished().items() if len(ends) == 1}


def played(depth: int, seed: int, late: int | None, **options: Any) -> Chain:
    chain, _ = make_masked_chain(depth, late, schedule=seeded_schedule(seed), **options)
    submit_some(chain, seed)
    chain.run()
    chain.engine.drain("test")
    chain.check_nothing_is_left()
    return chain


@cache
def expected_of(seed: int) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Tokens and reasons in serial, without drafts and with masks in time."""
    expected = told(played(0, seed, None, **options_of(seed)))
    assert len(expected[1]) == 12
    return expected


def options_of(seed: int) -> dict[str, Any]:
    return TIGHT if seed % 2 else {}


@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("seed", [0, 1, 2, 5, *(pytest.param(seed, marks=pytest.mark.large) for seed in (3, 4, 6, 7))])
def test_late_masks_and_drafts_change_no_token_at_any_depth(seed: int, drafts: dict[str, int]) -> None:
    held = 0
    for depth in DEPTHS:
        chain = played(depth, seed, 100 * seed + depth, **options_of(seed), **drafts)
        assert told(chain) == expected_of(seed), f"depth {depth}"
        held += chain.engine.scheduler.tally.counters["held_rows"]
        assert not drafts or chain.engine.scheduler.drafts.accepted.sum(), "no draft was right"
    assert held, "no mask was late"


def test_rows_with_a_grammar_are_evicted_and_held_in_these_tests() -> None:
    """Or the test before would show less than it says."""
    events = played(2, 1, 7, **TIGHT).engine.stats().events
    assert events["evicted"].count and events["readmitted"].count


@pytest.mark.parametrize("depth", DEPTHS)
def test_nobody_without_a_grammar_waits_for_a_mask(depth: int) -> None:
    chain, masks = make_masked_chain(depth, 0)
    masks.given_up = lambda now: ()  # type: ignore[method-assign] # the worker stands still
    chain.submit(1, [5, 6, 7], structure="any 5", max_tokens=20)
    chain.submit(2, [8, 9], max_tokens=20, ignore_eos=True)
    chain.turn_until(lambda: 2 in chain.finished())
    assert len(chain.tokens()[2]) == 20 and 1 not in chain.tokens()
    launches = chain.ledger.launched
    assert launches <= 20 + 3 + 2 * depth, "a row that waits has cost launches"
    assert chain.engine.scheduler.tally.counters["held_rows"] >= 18
    chain.tell(m.Abort(1, ("r1",)))
    chain.turn_until(lambda: 1 in chain.finished())
    chain.run()
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_rows_of_the_device_and_the_host_agree_while_one_is_held(depth: int) -> None:
    chain, _ = make_masked_chain(depth, 3)
    chain.submit(1, [5, 6, 7], structure="any 12", max_tokens=30)
    chain.submit(2, [8, 9], max_tokens=30, ignore_eos=True)
    for _ in range(60):
        chain.turn()
        chain.engine.drain("test")
        check_rows(chain.device.read_rows(), chain.engine.scheduler)
    chain.run()
    assert chain.engine.scheduler.tally.counters["held_rows"]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_row_that_may_say_nothing_ends_alone(depth: int) -> None:
    chain, _ = make_masked_chain(depth, 5)
    chain.submit(1, [5, 6, 7], structure="nothing 6", max_tokens=30)
    chain.submit(2, [8, 9], max_tokens=30, ignore_eos=True)
    chain.run()
    assert chain.finished()[1][0].reason == FinishReason.NOTHING_LEFT
    assert len(chain.tokens()[1]) == 6, "what came before it stays"
    assert len(chain.tokens()[2]) == 30
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_complete_grammar_ends_before_min_tokens(depth: int) -> None:
    chain, _ = make_masked_chain(depth, 5)
    chain.submit(1, [5, 6, 7], structure="any 6", max_tokens=30, min_tokens=20)
    chain.run()
    assert chain.finished()[1][0].reason == FinishReason.END_OF_SEQUENCE
    assert len(chain.tokens()[1]) == 7


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_whose_masks_will_not_come_ends_and_others_go_on(depth: int) -> None:
    chain, masks = make_masked_chain(depth, 2)
    for handle in (1, 2):
        chain.submit(handle, [5, 6, handle], structure="any 15", max_tokens=30)
    chain.turn_until(lambda: chain.tokens().get(1))
    tracked = chain.engine.registry.by_id("r1")
    assert tracked is not None
    masks.lose(tracked.request.order)
    chain.run()
    assert chain.finished()[1][0].reason == FinishReason.STRUCTURE_COST
    assert chain.finished()[2][0].reason == FinishReason.END_OF_SEQUENCE
    chain.check_nothing_is_left()
    assert not chain.engine.structured.requests


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_row_begins_free_of_who_was_held_before(depth: int) -> None:
    """It has the same slot, and a prompt of one chunk."""
    chain, masks = make_masked_chain(depth, 0, max_rows=1)
    masks.given_up = lambda now: ()  # type: ignore[method-assign] # the worker stands still
    chain.submit(1, [5, 6, 7], structure="any 5", max_tokens=20)
    chain.turn_until(lambda: chain.engine.scheduler.tally.counters["held_rows"] > 3)
    chain.tell(m.Abort(1, ("r1",)))
    chain.submit(2, [8, 9], max_tokens=9, ignore_eos=True)
    chain.run()
    alone, _ = make_masked_chain(0, None)
    alone.submit(2, [8, 9], max_tokens=9, ignore_eos=True)
    alone.run()
    assert chain.tokens()[2] == alone.tokens()[2]


def test_an_engine_that_only_has_plain_rows_asks_nobody_for_masks() -> None:
    chain, _ = make_masked_chain(2, None)
    chain.engine.structured.masks = Mock(spec=LateMasks)
    for handle in range(1, 9):
        chain.submit(handle, [5, handle], max_tokens=9)
    chain.run()
    assert len(chain.finished()) == 8
    assert not chain.engine.structured.masks.mock_calls


@pytest.mark.parametrize("depth", DEPTHS)
def test_below_min_tokens_a_stop_of_the_callers_is_not_drawn_even_if_the_grammar_asks_for_it(depth: int) -> None:
    """The grammar's own end would be: it is complete then."""
    alone, _ = make_masked_chain(0, None)
    alone.submit(1, [5, 6, 7], structure="one 6", max_tokens=30)
    alone.run()
    first, second = alone.tokens()[1][:2]
    chain, _ = make_masked_chain(depth, 5)
    chain.submit(1, [5, 6, 7], structure="one 6", max_tokens=30, min_tokens=4, stop_token_ids=(first,))
    chain.submit(2, [5, 6, 7], structure="one 6", max_tokens=30, min_tokens=1, stop_token_ids=(second,))
    chain.submit(3, [8, 9], max_tokens=30, ignore_eos=True)
    chain.run()
    assert chain.finished()[1][0].reason == FinishReason.NOTHING_LEFT and 1 not in chain.tokens()
    assert chain.finished()[2][0].reason == FinishReason.STOP and chain.tokens()[2] == [first, second]
    assert len(chain.tokens()[3]) == 30
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_first_launch_with_drafts_has_what_a_grammar_forces(depth: int) -> None:
    """Launches of nine rows have none. When one of them ends, the next launch drafts at once. (This device is done with
    a launch before the host hears of the one before, so that deeper chains hold the row half of the time.)"""
    chain, _ = make_masked_chain(depth, None, max_rows=9, forced_drafts=3, num_blocks=200)
    tell_of_marks_one_by_one(chain.device)
    looked_at: list[int] = []
    commit = chain.engine.scheduler.commits.commit

    def watched(launch: Any, cells: Any, drafted: Any) -> Any:
        if drafted is not None:
            looked_at.append(int(drafted.max()) & ~FORCED)
        return commit(launch, cells, drafted)

    chain.engine.scheduler.commits.commit = watched  # type: ignore[method-assign, assignment]
    chain.submit(1, [5, 6, 7], structure="one 40", max_tokens=60)
    for handle in range(2, 10):
        chain.submit(handle, [5, handle], max_tokens=20 if handle == 9 else 60, ignore_eos=True)
    chain.turn_until(lambda: len(chain.tokens().get(9, ())) >= 12)
    assert not looked_at, "nine rows"
    chain.turn_until(lambda: looked_at)
    assert looked_at[0] == 3, "the first launch of eight rows"
    chain.run()
    chain.check_nothing_is_left()
