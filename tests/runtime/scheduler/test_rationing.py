"""Who goes on when blocks run out, and who gives theirs up."""

from __future__ import annotations

import numpy as np
import pytest

from runahead.runtime.scheduler.rationing import Need, Shortage, choose_victim, ration
from runahead.runtime.scheduler.request import MAX_EVICTIONS, Request
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams


def request(order: int, priority: int = 0, evictions: int = 0) -> Request:
    prompt = np.array([3, 4], np.int32)
    return Request(
        1, order, f"r{order}", prompt, SamplingParams(), StoppingParams(9), 11,
        priority=priority, order=order, evictions=evictions,
    )  # fmt: skip


def ids(requests: tuple[Request, ...]) -> list[str]:
    return [request.request_id for request in requests]


# ---------------------------------------------------------------- ration


@pytest.mark.parametrize("available", [6, 7])
def test_there_is_no_shortage_while_every_need_is_covered(available: int) -> None:
    assert ration([Need(request(1), 2), Need(request(2), 4)], available) is None


def test_nobody_needs_anything_of_an_empty_pool() -> None:
    assert ration([], 0) is None
    assert ration([Need(request(1), 0)], 0) is None


def test_rows_are_served_by_priority_and_then_by_arrival() -> None:
    needs = [Need(request(3), 1), Need(request(1), 1), Need(request(2), 1), Need(request(4, priority=1), 1)]
    for available, waiting in enumerate((["r4", "r1", "r2", "r3"], ["r1", "r2", "r3"], ["r2", "r3"], ["r3"])):
        shortage = ration(needs, available)
        assert shortage is not None
        assert ids(shortage.waiting) == waiting
        assert shortage.missing == 1


def test_a_small_need_does_not_overtake_a_large_one() -> None:
    shortage = ration([Need(request(1), 1), Need(request(2), 5), Need(request(3), 1)], 4)
    assert shortage is not None
    assert ids(shortage.waiting) == ["r2", "r3"]
    assert shortage.missing == 2


def test_a_row_that_needs_no_block_goes_on_whoever_waits() -> None:
    shortage = ration([Need(request(1), 3), Need(request(2), 0), Need(request(3), 1)], 2)
    assert shortage is not None
    assert ids(shortage.waiting) == ["r1", "r3"]


# ---------------------------------------------------------------- the victim


def victim(waiting: list[Request], rows: list[Request]) -> str | None:
    chosen = choose_victim(Shortage(tuple(waiting), 1), rows)
    return None if chosen is None else chosen.request_id


def test_while_a_row_goes_on_nobody_of_the_same_priority_is_evicted() -> None:
    a, b, c = request(1), request(2), request(3)
    assert victim([a], [a, b, c]) is None
    assert victim([a, c], [a, b, c]) is None


def test_when_every_row_waits_the_youngest_is_evicted() -> None:
    a, b, c = request(1), request(2), request(3)
    assert victim([a, b, c], [b, c, a]) == "r3"


def test_the_youngest_of_the_lowest_priority_is_evicted_not_the_youngest_of_all() -> None:
    low, older, younger = request(1, priority=-1), request(2), request(3)
    assert victim([older, younger, low], [low, older, younger]) == "r1"
    lower = request(4, priority=-1)
    assert victim([older, younger, low, lower], [low, older, younger, lower]) == "r4"


def test_a_row_of_a_higher_priority_evicts_one_that_goes_on() -> None:
    high, a, b = request(3, priority=1), request(1), request(2)
    assert victim([high], [a, b, high]) == "r2"


def test_a_row_of_a_lower_priority_evicts_nobody_that_goes_on() -> None:
    high, low = request(1, priority=1), request(2)
    assert victim([low], [high, low]) is None


def test_the_row_that_waits_first_is_never_its_own_victim() -> None:
    alone = request(1)
    assert victim([alone], [alone]) is None
    assert victim([alone, request(2)], [alone, request(3)]) == "r3"


@pytest.mark.parametrize(("evictions", "protected"), [(MAX_EVICTIONS - 1, False), (MAX_EVICTIONS, True)])
def test_a_request_evicted_often_enough_is_spared(evictions: int, protected: bool) -> None:
    a, b, often = request(1), request(2), request(3, evictions=evictions)
    assert often.is_protected == protected
    assert victim([a, b, often], [a, b, often]) == ("r2" if protected else "r3")


def test_a_row_of_the_lowest_priority_leaves_before_others_however_often_it_did() -> None:
    low, high, higher = request(1, evictions=MAX_EVICTIONS), request(2, priority=5), request(3, priority=5)
    everybody = Shortage((high, higher, low), 1)
    assert choose_victim(everybody, [low, high, higher]) is low
    only_one = Shortage((high,), 1)
    assert choose_victim(only_one, [low, high, higher]) is low, "it goes on, and one of a higher priority waits"


def test_a_request_evicted_often_enough_is_served_before_older_ones_of_its_priority() -> None:
    """Or the older one would wait first, be spared for that, and the other would be evicted once more."""
    older, often, low = request(1), request(2, evictions=MAX_EVICTIONS), request(3, priority=-1)
    shortage = ration([Need(low, 1), Need(older, 1), Need(often, 1)], 0)
    assert shortage is not None
    assert ids(shortage.waiting) == ["r2", "r1", "r3"]
    assert victim([often, older], [older, often]) == "r1"
    shortage = ration([Need(often, 1), Need(request(4, priority=1), 1)], 0)
    assert shortage is not None
    assert ids(shortage.waiting) == ["r4", "r2"], "not before a higher priority"
