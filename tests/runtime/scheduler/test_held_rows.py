"""Rows that S may hold beside rows that it may not, with launches that each have their own number of drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import HELD
from runahead.runtime.scheduler.ledger import LedgerError
from tests.runtime.scheduler.played import Played, token

DEPTHS = [0, 1, 2, 4]
STRETCH = 5  # launches with the same number of drafts


class InTurn:
    """A number of drafts for every few launches, in turn."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.most = max(counts)
        self._counts = counts

    def drafts(self, number: int, rows: int) -> int:
        return self._counts[number // STRETCH % len(self._counts)]

    def stays_until(self, number: int) -> int:
        return number // STRETCH * STRETCH + STRETCH - 1

    def learn(self, number: int, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        assert (accepted <= drafted).all()


def played(depth: int, counts: Sequence[int], seed: int, holds: float, *, some_may_hold: bool) -> Played:
    """Run to the end; every token was kept once, and everything is given back."""
    choice = InTurn(counts)
    game = Played(choice.most, run_ahead=depth, seed=seed, choice=choice, holds=holds)
    dice, asked = random.Random(seed), {}
    for handle in range(1, 9):
        asked[handle] = (dice.randint(1, 50), dice.randint(1, 50))
        game.submit(handle, *asked[handle], may_hold=some_may_hold and handle % 2 == 0)
        if dice.random() < 0.5:
            game.turn()
    game.run()
    assert game.said == {
        handle: [token(handle, place) for place in range(length, length + count)]
        for handle, (length, count) in asked.items()
    }
    assert sorted(game.ended) == sorted(asked)
    assert game.scheduler.pool.available == game.scheduler.pool.total
    assert game.scheduler.rows.free == game.scheduler.rows.max_rows
    return game


@pytest.mark.parametrize("counts", [(0,), (3,), (0, 3, 1)], ids=str)
@pytest.mark.parametrize("holds", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("depth", DEPTHS)
def test_rows_that_are_held_go_on_where_they_were(depth: int, holds: float, counts: Sequence[int]) -> None:
    for seed in range(4):
        game = played(depth, counts, seed, holds, some_may_hold=True)
        assert (game.events["held"] > 0) == (holds > 0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_launches_with_their_own_numbers_of_drafts_bring_every_token_once(depth: int) -> None:
    for seed in range(4):
        game = played(depth, (3, 0, 1), seed, 0.0, some_may_hold=False)
        assert {plan.drafts for plan in game.plans} == {0, 1, 3}
        assert game.scheduler.drafts.accepted.sum() > 0


def test_where_no_launch_of_a_while_has_drafts_its_plans_are_continued() -> None:
    game = played(2, (0, 0, 0, 1), 1, 0.0, some_may_hold=False)
    unchanged = sum(not plan.row_list_changed and plan.drafts == 0 for plan in game.plans)
    assert unchanged > len(game.plans) // 3


def test_a_row_that_waits_for_nothing_may_not_be_held() -> None:
    game = Played()
    game.submit(1, 5, 10)
    for _ in range(2):
        game.launch()
    game.commit()
    number = game.ledger.next_to_commit().number
    cells, _ = game._cells[number]
    cells[0, 0] = cells[0, 0] >> 32 << 32 | HELD
    with pytest.raises(LedgerError, match=f"launch {number}: the device holds a row that waits for nothing"):
        game.commit()
