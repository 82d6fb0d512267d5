"""Rows that a plan has no room for wait for the next one: they are left out of no steady."""

from __future__ import annotations

import pytest

from runahead.runtime.plan import APPEND_WORDS, CHUNK_WORDS
from runahead.runtime.scheduler.ledger import Launch
from tests.runtime.chain import Chain, make_chain, tightest_plan
from tests.runtime.pressure import whole
from tests.runtime.scheduler.taken_over import TakenOver, nothing_is_taken_over
from tests.runtime.scheduler.test_steady_decode import Recorder

ROWS, BLOCK = 8, 16
PLAN_WORDS = tightest_plan(ROWS, BLOCK, BLOCK)
ROOM = (2 + CHUNK_WORDS + APPEND_WORDS) // APPEND_WORDS  # borders that fit into a plan beside the list of all rows


def rows_at_a_border(late: range) -> Chain:
    """Rows that are all as long when the last of them begins, but those of `late`, which are a token behind.

    One begins with each launch, so each prompt is a token longer than the one before.
    """
    chain = make_chain(
        1, max_rows=ROWS, block_size=BLOCK, prefill_chunk=BLOCK, plan_words=PLAN_WORDS, admissions=1, prefix_cache=False
    )
    for slot in range(ROWS):
        chain.submit(slot + 1, [slot + 2] * (slot + 2 - (slot in late)), max_tokens=60, ignore_eos=True)
    return chain


@pytest.mark.parametrize(
    ("late", "rows"),
    [
        pytest.param(range(0), [[0, 1, 2], [0, 1, 2, 3, 4, 5]], id="all of them with one launch"),
        # Twice the same rows go on, and the two that can't are more than the plan has room for both times.
        pytest.param(range(3, 6), [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]], id="some a launch later"),
    ],
)
def test_rows_that_cross_a_border_in_steady_decode_wait_for_a_plan_with_room_and_go_on_at_once(
    late: range, rows: list[list[int]]
) -> None:
    assert ROOM == 3, "as many as the lists of rows above say"
    chain = rows_at_a_border(late)
    taken_over = TakenOver(chain.engine.scheduler)
    recorder, crossed = Recorder(chain), list[list[int]]()
    enqueue = chain.ledger.enqueue

    def watched(launch: Launch) -> None:
        if launch.crossed_slots.size:
            crossed.append(launch.row_slots.tolist())
        enqueue(launch)

    chain.ledger.enqueue = watched  # type: ignore[method-assign]
    chain.turn_until(lambda: crossed)
    assert taken_over.seen["plans"], "they had come to the border in steady decode"
    chain.run()
    everybody = list(range(ROWS))
    assert crossed[:3] == [*rows, everybody], "those that were left out go on with the first plan that has room"
    assert chain.tokens() == {slot + 1: whole([slot + 2] * (slot + 2 - (slot in late)), 60) for slot in range(ROWS)}
    anew = rows_at_a_border(late)
    nothing_is_taken_over(anew.engine.scheduler)
    again = Recorder(anew)
    anew.run()
    recorder.check_same(again)
