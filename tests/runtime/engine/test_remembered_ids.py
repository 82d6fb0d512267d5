"""Ids that are remembered are bounded in number, and no caller makes the engine forget another's."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from runahead.runtime.engine.live_requests import RememberedIds

MOST = 12
CALLERS = ["", "a/", "b/", "c/"]
IDS = st.tuples(st.sampled_from(CALLERS), st.integers(0, 30)).map(lambda drawn: f"{drawn[0]}{drawn[1]}")


def test_the_oldest_of_one_caller_is_forgotten_when_there_are_too_many_and_one_added_again_is_new() -> None:
    ids = RememberedIds(3)
    for request_id in ("a/1", "a/2", "a/3", "a/1", "a/4"):
        ids.add(request_id, 1.0)
    assert [f"a/{number}" in ids for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert len(ids) == 3


def test_an_id_is_taken_once_and_with_its_last_time() -> None:
    ids = RememberedIds(3)
    ids.add("1", 1.0)
    ids.add("1", 2.0)
    assert (ids.pop("1"), ids.pop("1"), len(ids)) == (2.0, None, 0)
    assert ids.pop("a/nobody") is None


def test_more_callers_than_there_is_room_for_are_bounded_too_and_the_newest_is_there() -> None:
    ids = RememberedIds(3)
    for number in range(10):
        ids.add(f"{number}/r", 1.0)
        assert f"{number}/r" in ids
        assert len(ids) == min(number + 1, 3)
    assert len(ids._by_caller) == 3, "nothing is kept of who has none left"


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), IDS), max_size=200))
def test_who_has_less_than_an_equal_share_loses_nothing_by_what_others_add(steps: list[tuple[bool, str]]) -> None:
    ids, known = RememberedIds(MOST), set[str]()
    for adds, request_id in steps:
        before = Counter(known_id.rpartition("/")[0] for known_id in known)
        if adds:
            ids.add(request_id, 1.0)
            known.add(request_id)
        else:
            assert (ids.pop(request_id) is not None) == (request_id in known)
            known.discard(request_id)
        lost = {known_id for known_id in known if known_id not in ids}
        known -= lost
        assert len(ids) == len(known) <= MOST
        assert not adds or request_id in ids
        for known_id in lost:
            caller = known_id.rpartition("/")[0]
            assert before[caller] * len(before | Counter([request_id.rpartition("/")[0]])) >= MOST
