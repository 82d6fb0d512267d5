"""Row slots change hands only as they may, and each time in a new epoch."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from runahead.runtime.scheduler.rows import RowPhase, Rows


def test_a_slot_has_a_new_epoch_when_it_is_allocated_and_when_its_row_ends() -> None:
    rows = Rows(2, 4, 16)
    epochs = [int(rows.epoch[0])]
    for _ in range(2):
        slot = rows.allocate()
        assert slot == 0
        epochs.append(int(rows.epoch[0]))
        rows.fence(slot)
        epochs.append(int(rows.epoch[0]))
        rows.release(slot)
    assert epochs == sorted(set(epochs))


def test_a_launchs_row_counts_until_its_slot_changes_hands() -> None:
    rows = Rows(3, 4, 16)
    slots = np.array([rows.allocate(), rows.allocate()], np.int32)
    epochs = rows.epoch[slots]
    assert rows.still(slots, epochs).all()
    rows.fence(int(slots[0]))
    assert rows.still(slots, epochs).tolist() == [False, True]
    rows.release(int(slots[0]))
    assert rows.allocate() == slots[0]
    assert rows.still(slots, epochs).tolist() == [False, True]


def test_the_lowest_free_slot_is_allocated_whichever_was_given_back_last() -> None:
    """So that few rows are in low slots, of which alone a GPU may keep the logits of drafts."""
    rows = Rows(4, 4, 16)
    assert [rows.allocate() for _ in range(4)] == [0, 1, 2, 3]
    for slot in (1, 0, 3):
        rows.fence(slot)
        rows.release(slot)
    assert [rows.allocate() for _ in range(3)] == [0, 1, 3]


def test_a_fenced_slot_is_not_free() -> None:
    rows = Rows(2, 4, 16)
    slot = rows.allocate()
    rows.phase[slot] = RowPhase.DECODE
    rows.fence(slot)
    assert (rows.free, rows.fenced) == (1, 1)
    rows.check()
    rows.release(slot)
    assert (rows.free, rows.fenced) == (2, 0)
    rows.check()


def test_a_slot_is_released_once_and_only_from_behind_the_fence() -> None:
    rows = Rows(2, 4, 16)
    slot = rows.allocate()
    with pytest.raises(RuntimeError, match="was not fenced"):
        rows.release(slot)
    rows.fence(slot)
    rows.release(slot)
    with pytest.raises(RuntimeError, match="was not fenced"):
        rows.release(slot)


def test_a_phase_that_is_not_the_free_lists_is_found() -> None:
    rows = Rows(2, 4, 16)
    rows.phase[1] = RowPhase.DECODE
    with pytest.raises(RuntimeError, match="free row slots"):
        rows.check()


def decoding(number: int) -> tuple[Rows, NDArray[np.int64]]:
    """A row of 5 tokens that may be held, in the F of launch `number`, and its slot."""
    rows = Rows(1, 4, 16)
    slots = np.array([rows.allocate()])
    rows.begin(0, np.arange(5, dtype=np.int32), 2, 0)
    rows.may_hold[0] = True
    rows.plan_chunk(0, 5, number)
    rows.enter(0, RowPhase.DECODE)
    rows.note_launch(slots, number, np.array([True]))
    return rows, slots


NONE_BROUGHT = np.zeros(1, np.int64)


def test_a_row_that_is_held_and_in_no_plan_waits_until_it_is_planned_or_another_has_its_slot() -> None:
    rows, slots = decoding(7)
    rows.correct_bounds(slots, 8, NONE_BROUGHT)
    assert rows.waits[0]
    assert (rows.least_len[0], rows.most_len[0], rows.state_len[0]) == (4, 4, 5), "its state stays as F has left it"
    rows.plan_decode(slots, rows.least_len[slots] + 1, rows.most_len[slots] + 1, 0)
    assert not rows.waits[0]
    rows.note_launch(slots, 9, np.array([True]))
    rows.correct_bounds(slots, 10, NONE_BROUGHT)
    assert rows.waits[0]
    rows.fence(0)
    rows.release(0)
    rows.begin(rows.allocate(), np.arange(5, dtype=np.int32), 2, 0)
    assert not rows.waits[0]


def test_a_row_that_is_held_and_planned_again_does_not_wait() -> None:
    rows, slots = decoding(7)
    rows.plan_decode(slots, rows.least_len[slots], rows.most_len[slots] + 1, 0)
    rows.note_launch(slots, 8, np.array([True]))
    rows.correct_bounds(slots, 8, NONE_BROUGHT)
    assert not rows.waits[0]
    assert (rows.least_len[0], rows.most_len[0], rows.state_len[0]) == (5, 5, 5)
