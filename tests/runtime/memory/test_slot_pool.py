"""Penalty slots and state slots change hands only as they may."""

from __future__ import annotations

import pytest

from runahead.runtime.memory.block_pool import SlotPool, SlotPoolError


def test_each_slot_is_given_out_once() -> None:
    pool = SlotPool(3, "penalty slot")
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    assert (pool.free, pool.owned, pool.fenced) == (0, 3, 0)
    with pytest.raises(SlotPoolError, match="a penalty slot is asked for and none is free"):
        pool.allocate()
    pool.check()


def test_a_pool_of_none_gives_none() -> None:
    pool = SlotPool(0, "state slot")
    pool.check()
    with pytest.raises(SlotPoolError, match="a state slot is asked for"):
        pool.allocate()


def test_a_fenced_slot_is_free_only_when_it_is_released() -> None:
    pool = SlotPool(1, "penalty slot")
    slot = pool.allocate()
    pool.fence(slot)
    assert (pool.free, pool.owned, pool.fenced) == (0, 0, 1)
    pool.check()
    with pytest.raises(SlotPoolError, match="none is free"):
        pool.allocate()
    pool.release(slot)
    assert (pool.free, pool.owned, pool.fenced) == (1, 0, 0)
    assert pool.allocate() == slot


def test_a_slot_is_fenced_once_by_whom_it_belongs_to() -> None:
    pool = SlotPool(2, "penalty slot")
    with pytest.raises(SlotPoolError, match="penalty slot 0 is given up and was not owned"):
        pool.fence(0)
    slot = pool.allocate()
    pool.fence(slot)
    with pytest.raises(SlotPoolError, match="was not owned"):
        pool.fence(slot)


def test_a_slot_is_released_once_and_only_from_behind_the_fence() -> None:
    pool = SlotPool(2, "penalty slot")
    slot = pool.allocate()
    with pytest.raises(SlotPoolError, match="penalty slot 0 is released and was not fenced"):
        pool.release(slot)
    pool.fence(slot)
    pool.release(slot)
    with pytest.raises(SlotPoolError, match="was not fenced"):
        pool.release(slot)


@pytest.mark.parametrize("place", ["_owned", "_fenced"])
def test_a_slot_in_two_places_is_found(place: str) -> None:
    pool = SlotPool(2, "penalty slot")
    getattr(pool, place).add(1)
    with pytest.raises(SlotPoolError, match="not each of 2 once"):
        pool.check()


def test_a_lost_slot_is_found() -> None:
    pool = SlotPool(2, "penalty slot")
    pool._free.pop()
    with pytest.raises(SlotPoolError, match="not each of 2 once"):
        pool.check()
