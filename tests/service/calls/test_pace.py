"""When to come back: what is ahead, over how fast room was made of late."""

from __future__ import annotations

import pytest

from runahead.service.calls.admission import Pace
from runahead.service.contract.limits import LIMITS


def paced(*looks: tuple[int, int, float]) -> Pace:
    """Looks as (held, given back so far, when)."""
    pace = Pace()
    for look in looks:
        pace.measure(*look)
    return pace


def test_the_wait_is_what_is_ahead_over_the_pace_of_late() -> None:
    pace = paced(*((1000, 50 * second, float(second)) for second in range(20)))
    assert pace.wait_s(1000) == pytest.approx(20.0)
    assert pace.wait_s(100) == pytest.approx(2.0)


def test_a_pace_that_changes_is_followed() -> None:
    pace = paced(*((1000, 50 * second, float(second)) for second in range(20)))
    for second in range(60):
        pace.measure(1000, 50 * 19 + 200 * (second + 1), 20.0 + second)
    assert pace.wait_s(1000) == pytest.approx(5.0, rel=0.1)


def test_time_in_which_nobody_waited_does_not_count() -> None:
    pace = paced((1000, 0, 0.0), (500, 500, 1.0), (0, 1000, 2.0), *((0, 1000, 3.0 + i) for i in range(1000)))
    assert pace.wait_s(1000) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("looks", [(), ((5, 0, 0.0),), ((0, 0, 0.0), (5, 0, 100.0)), ((5, 0, 0.0), (5, 1, 0.01))])
def test_before_anything_is_known_it_is_a_second(looks: tuple[tuple[int, int, float], ...]) -> None:
    assert paced(*looks).wait_s(1_000_000) == LIMITS.retry_s


def test_where_nothing_moves_the_wait_grows_with_the_time_that_nothing_has_moved() -> None:
    assert paced((9, 0, 0.0), (9, 0, 5.0)).wait_s(1) == pytest.approx(5.0)
    assert paced((9, 0, 0.0), *((9, 0, 1.0 + second) for second in range(10_000))).wait_s(1) < LIMITS.retry_most_s


def test_the_wait_is_bounded_on_both_sides() -> None:
    pace = paced((1000, 0, 0.0), (1000, 1000, 1.0))
    assert pace.wait_s(10**9) == LIMITS.retry_most_s
    assert pace.wait_s(1) == LIMITS.retry_least_s
