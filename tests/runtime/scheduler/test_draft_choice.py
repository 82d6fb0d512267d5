"""How many drafts a launch verifies, from what the drafts of launches before have brought."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from runahead.runtime.process.parts import DRAFT_COSTS
from runahead.runtime.scheduler.draft_choice import (
    KNOWN_AFTER,
    MOST,
    PROBE_EVERY,
    STRETCH,
    ChoiceByAcceptance,
    ChoiceByForms,
    ChoiceOfAHead,
    DraftCosts,
)

COSTS = msgspec.json.decode(DRAFT_COSTS.read_bytes(), type=DraftCosts)
PROBES = PROBE_EVERY * STRETCH  # launches from one probe to the next


def after(
    rows: int, right: int, launches: int = 3 * PROBES, depth: int = 0, step: float = 0.0
) -> tuple[ChoiceByAcceptance, list[int]]:
    """Launches in which so many drafts of each row are right, and how many each of them has. depth: launches that are
    planned before the oldest of them is committed. step: of the drafter."""
    choice = ChoiceOfAHead(COSTS, step) if step else ChoiceByAcceptance(COSTS)
    chosen = list[int]()
    for number in range(launches):
        chosen.append(choice.drafts(number, rows))
        looked_at = number - depth
        if looked_at > 0 and chosen[looked_at - 1]:
            drafted = np.full(rows, chosen[looked_at - 1])
            choice.learn(looked_at, drafted, np.minimum(drafted, right))
    return choice, chosen


def unprobed(chosen: list[int]) -> set[int]:
    """Of the last third, the launches that try nothing."""
    return {count for number, count in enumerate(chosen) if number >= 2 * PROBES and number % PROBES >= STRETCH}


@pytest.mark.parametrize("rows", [1, 2, 4, 16, 64])
def test_drafts_that_are_always_right_are_all_verified_and_those_that_never_are_none(rows: int) -> None:
    assert unprobed(after(rows, MOST)[1]) == {MOST}
    assert unprobed(after(rows, 0)[1]) == {0}


def test_as_many_as_are_right_are_verified() -> None:
    assert unprobed(after(4, 1)[1]) == {1}
    assert unprobed(after(4, 3)[1]) == {3}


def test_what_the_drafter_itself_takes_is_part_of_the_price() -> None:
    """Half of the second and third drafts are right."""
    assert unprobed(after(1, 2)[1]) == {3}
    assert unprobed(after(1, 2, step=0.05)[1]) == {3}
    assert unprobed(after(1, 2, step=0.35)[1]) == {1}
    assert unprobed(after(1, 2, step=1.1)[1]) == {0}


def test_a_head_that_is_always_right_drafts_as_many_as_there_are() -> None:
    assert unprobed(after(1, MOST, step=0.2)[1]) == {MOST}


def test_a_head_that_is_never_right_is_tried_rarely_and_with_little() -> None:
    """A launch at most twice as long, 8 of 768 times."""
    chosen = after(1, 0, 4 * PROBES, step=0.2)[1]
    tried = [number for number, count in enumerate(chosen) if count and number >= 2 * PROBES]
    assert tried == list(range(2 * PROBES, 2 * PROBES + STRETCH))
    assert {chosen[number] for number in tried} == {3}
    assert {count for count in after(16, 0, 4 * PROBES, step=0.25)[1] if count} == {1}


def test_without_right_drafts_of_a_head_plans_stay_as_they_are_until_the_next_try() -> None:
    choice, _ = after(1, 0, PROBES, step=0.25)
    assert choice.stays_until(PROBES) == 2 * PROBES - 1


def test_where_nothing_pays_it_is_tried_again_now_and_then() -> None:
    chosen = after(16, 0, 4 * PROBES)[1]
    tried = {number for number, count in enumerate(chosen) if count and number >= PROBES}
    assert tried == {number for number in range(PROBES, 4 * PROBES) if number % PROBES < STRETCH}


def test_what_pays_again_is_found() -> None:
    choice, chosen = after(4, 0)
    assert chosen[-1] == 0
    for number in range(3 * PROBES, 6 * PROBES):
        count = choice.drafts(number, 4)
        if count:
            choice.learn(number, np.full(4, count), np.full(4, count))
    assert choice.drafts(6 * PROBES + STRETCH, 4) > 0


@pytest.mark.parametrize("right", [0, 1, 2, MOST])
def test_what_is_committed_late_changes_no_choice(right: int) -> None:
    """Launch k knows of launches up to k - 5, of which every depth has committed all by then."""
    at_once = after(2, right)[1]
    for depth in range(1, KNOWN_AFTER):
        assert after(2, right, depth=depth)[1] == at_once


def test_launches_without_drafts_stay_so_until_the_next_try_and_others_for_a_stretch() -> None:
    choice, _ = after(16, 0, 2 * PROBES + 40)
    number = 2 * PROBES + 40
    assert choice.drafts(number, 16) == 0
    last = choice.stays_until(number)
    assert last == 3 * PROBES - 1
    assert {choice.drafts(later, 16) for later in range(number, last + 1)} == {0}
    assert choice.drafts(last + 1, 16) > 0
    choice.learn(last + 2, np.full(16, 3), np.full(16, 3))
    assert choice.stays_until(last + 2) == last + STRETCH


@pytest.mark.parametrize(("rows", "tried"), [(1, 7), (4, 7), (5, 3), (8, 3), (9, 1), (32, 1)])
def test_where_every_row_costs_its_query_tokens_few_of_them_are_tried(rows: int, tried: int) -> None:
    assert ChoiceByForms(COSTS).drafts(PROBES * 2, rows) == tried


def learned(rows: int, right: int, row_of: int = 1, step: float = 0.0) -> int:
    """K after so many launches in which of every `row_of`-th row so many drafts were right, of the others none. step:
    what the drafter takes for a place of the run."""
    choice = ChoiceByForms(COSTS, step)
    for number in range(2 * PROBES):
        count = choice.drafts(number, rows)
        if count:
            accepted = np.where(np.arange(rows) % row_of == 0, min(count, right), 0)
            choice.learn(number, np.full(rows, count), accepted)
    return choice.drafts(2 * PROBES + PROBES // 2, rows)


def test_where_every_row_costs_its_query_tokens_the_form_that_brings_most_is_taken() -> None:
    assert [learned(rows, MOST) for rows in (1, 4, 8)] == [7, 7, 7]
    assert [learned(rows, 0) for rows in (1, 4, 8, 32)] == [0, 0, 0, 0]
    assert learned(8, 1) == 1, "the first draft alone is right"
    assert learned(32, 1, row_of=8) == 0, "one row of eight does not pay for the others"
    assert learned(1, 1) > 0, "what one row pays is the first draft"


def test_steps_of_a_drafter_are_paid_for_by_the_tokens_that_they_bring() -> None:
    assert [learned(1, MOST, step=step) for step in (0.1, 2.0)] == [7, 0]
    assert [learned(1, 1, step=step) for step in (0.05, 0.5)] == [1, 0]
