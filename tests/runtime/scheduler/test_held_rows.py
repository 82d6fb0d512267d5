"""Rows that S may hold beside rows that it may not, with launches that each have their own number of drafts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import HELD
from runahead.runtime.plan import stage
from runahead.runtime.scheduler.ledger import LedgerError
from tests.runtime.scheduler.played import Played, token
from tests.runtime.scheduler.taken_over import TakenOver, nothing_is_taken_over

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
@pytest.mark.parametrize("holds", [0.0, pytest.param(0.3, marks=pytest.mark.large), 0.9])
@pytest.mark.parametrize("depth", DEPTHS)
def test_rows_that_are_held_go_on_where_they_were(depth: int, holds: float, counts: Sequence[int]) -> None:
    for seed in range(2):
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


class Written(Played):
    """Writes down what it plans, and the host's columns behind each launch and each commit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.written: list[list[int]] = []
        self.taken_over = TakenOver(self.scheduler)
        self.counts = self.taken_over.seen

    def launch(self) -> bool:
        if not super().launch():
            return False
        body, bulk = np.zeros(1 << 12, np.int32), np.zeros(1 << 14, np.int32)
        stage(self.plans[-1], body, bulk)
        self.written += [body.tolist(), bulk.tolist()]
        return True

    def check(self) -> None:
        super().check()
        rows = self.scheduler.rows
        self.written += [rows.planned.ravel().tolist(), rows.num_blocks.tolist(), rows.committed_len.tolist()]


class Anew(Written):
    """Makes every plan anew, and looks at every row of each commit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        nothing_is_taken_over(self.scheduler)


@pytest.mark.parametrize(("depth", "holds"), [*product(DEPTHS, (0.0, 0.05)), (2, 0.5)])
def test_launches_of_rows_that_may_be_held_take_over_what_they_can_and_nothing_else(depth: int, holds: float) -> None:
    """Each plan, each column: what would be there if each row were looked at each time."""
    counts: Counter[str] = Counter()
    for seed in range(4):
        games: list[Written] = []
        for kind in (Written, Anew):
            game = kind(run_ahead=depth, seed=seed, holds=holds, blocks=(40, 18)[seed % 2], has_state=seed % 3 == 0)
            dice = random.Random(seed)
            for handle in range(1, 9):
                game.submit(handle, dice.randint(1, 30), dice.randint(1, 60), may_hold=handle % 3 > 0)
                for _ in range(dice.randint(0, 9)):
                    game.turn()
            game.run()
            games.append(game)
        assert games[0].written == games[1].written
        assert games[0].said == games[1].said
        counts += games[0].counts
        assert not games[1].counts.total()
    assert counts["plans"] > 20 and counts["commits"] > 20 and (counts["borders"] or holds)


class Together(Written):
    """Launches in flight are committed together, before the next ones are planned: a row may be held several times
    between two plans, and then be at a border with room for a whole block."""

    def launch(self) -> bool:
        steady, is_launched = self.taken_over.steady, super().launch()
        if is_launched and self.taken_over.steady not in (None, steady):
            rows, size = self.scheduler.rows, self.scheduler.pool.block_size
            held = self.plans[-1].rows
            room = rows.num_blocks[held] * size - rows.most_len[held]
            self.counts["rooms for a block"] += int(np.count_nonzero(room == size))
        return is_launched

    def turn(self) -> bool:
        while self.ledger.has_room and (self.launch() or self.give_back()):
            pass
        uncommitted = self.ledger.uncommitted
        for _ in range(uncommitted):
            self.commit()
        return uncommitted > 0


class TogetherAnew(Together, Anew):
    """The same, with every plan made anew."""


def test_plans_of_rows_that_are_held_exactly_at_a_border_are_those_that_would_be_made_anew() -> None:
    counts: Counter[str] = Counter()
    for seed in range(8):
        games: list[Written] = []
        for kind in (Together, TogetherAnew):
            game = kind(run_ahead=3, seed=seed, holds=0.6)
            for handle in range(1, 3):
                game.submit(handle, 6, 60, may_hold=True)
            game.run()
            games.append(game)
        assert games[0].written == games[1].written
        assert games[0].said == games[1].said
        counts += games[0].counts
    assert counts["rooms for a block"] > 20 and counts["plans"] > 100


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
