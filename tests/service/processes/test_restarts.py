"""How often a front end is started again: at once, then later and later, and in the end not any more."""

from __future__ import annotations

from runahead.service.processes.children import BACK_OFF_S, SERVED_S, Restarts


def test_a_front_end_that_dies_again_and_again_is_started_later_and_later_and_then_not_any_more() -> None:
    restarts = Restarts()
    assert [restarts.died(0.0) for _ in range(len(BACK_OFF_S) + 2)] == [*BACK_OFF_S, None, None]
    assert list(BACK_OFF_S) == sorted(BACK_OFF_S)


def test_one_that_has_served_for_long_has_not_died_of_its_start() -> None:
    restarts = Restarts()
    for _ in range(3):
        assert [restarts.died(0.0) for _ in BACK_OFF_S[1:]][-1] is not None
        assert restarts.died(SERVED_S) == BACK_OFF_S[0]
