"""Row slots change hands only as they may, and each time in a new epoch."""

from __future__ import annotations

import numpy as np
import pytest

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
