"""A line of masks is read whole, and only as what it was written for."""

from __future__ import annotations

import os

import numpy as np
import pytest
from numpy.typing import NDArray

from runahead.runtime.masks import mask_memory
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.token_mask import token_mask

VOCAB = 100
MASK = token_mask((3, 64, 99), VOCAB)


def read(memory: MaskMemory, slot: int, epoch: int, position: int) -> list[int] | None:
    """The mask of a row's next position, read alone and beside that of row slot 0."""
    slots, epochs, positions = np.array([0, slot]), np.array([9, epoch]), np.array([9, position], np.int32)
    there, masks = memory.read_next(slots, epochs, positions)
    alone = memory.read(slot, epoch, position)
    found = None if alone is None else alone.tolist()
    assert found == (masks[1].tolist() if there[1] else None)
    return found


def test_a_mask_is_read_as_it_was_written() -> None:
    memory = MaskMemory(4, VOCAB)
    memory.write(2, 7, 19, MASK)
    assert read(memory, 2, 7, 19) == MASK.tolist()
    found, (_, together) = memory.read(2, 7, 19), memory.read_next(np.array([2]), np.array([7]), np.array([19]))
    memory.write(2, 7, 20, ~MASK)
    assert found is not None and found.tolist() == MASK.tolist(), "what was read once changes no more"
    assert together[0].tolist() == MASK.tolist()


def test_masks_of_several_rows_are_written_at_once_as_they_are_one_by_one() -> None:
    together, alone = MaskMemory(4, VOCAB, drafts=2), MaskMemory(4, VOCAB, drafts=2)
    tags, masks = np.array([(3, 7, 19), (0, 8, 4)]), np.stack([MASK, ~MASK])
    together.write_next(tags, masks)
    for (slot, epoch, position), mask in zip(tags.tolist(), masks, strict=True):
        alone.write(slot, epoch, position, mask)
    assert np.array_equal(together.words, alone.words)


def test_a_row_of_a_service_that_has_run_for_years_has_its_mask() -> None:
    """Epochs are launches' numbers."""
    memory = MaskMemory(4, VOCAB)
    memory.write(2, 7 << 40, 19, MASK)
    assert read(memory, 2, 7 << 40, 19) == MASK.tolist()
    assert read(memory, 2, 0, 19) is None


@pytest.mark.parametrize(("slot", "epoch", "position"), [(2, 8, 19), (2, 7, 20), (2, 7, 18), (1, 7, 19)])
def test_nobody_reads_the_mask_of_another_row_or_position(slot: int, epoch: int, position: int) -> None:
    """The row that had the slot before may have been at the same position."""
    memory = MaskMemory(4, VOCAB)
    memory.write(2, 7, 19, MASK)
    assert read(memory, slot, epoch, position) is None


def test_memory_that_nobody_has_written_holds_no_mask() -> None:
    assert read(MaskMemory(4, VOCAB), 1, 0, 0) is None


def test_a_line_that_is_half_written_is_no_mask() -> None:
    """Whatever word of the old line is still there, or of the new one already."""
    memory, other = MaskMemory(2, VOCAB), MaskMemory(2, VOCAB)
    memory.write(1, 7, 19, MASK)
    other.write(1, 7, 20, token_mask((1, 40, 80, 96), VOCAB))
    old, new = memory.lines[1, 0].copy(), other.lines[1, 0].copy()
    different = np.flatnonzero(old != new).tolist()
    assert len(different) >= 4
    for count in range(1, len(different)):
        for order in (different, different[::-1]):
            memory.lines[1, 0] = old
            memory.lines[1, 0][order[:count]] = new[order[:count]]
            for position in (19, 20):
                assert read(memory, 1, 7, position) is None, "words of two lines were taken for one"


def test_processes_share_a_file() -> None:
    file = os.memfd_create("masks")
    os.truncate(file, MaskMemory.size(3, VOCAB))
    here, there = MaskMemory(3, VOCAB, memory=file), MaskMemory(3, VOCAB, memory=file)
    os.close(file)
    there.write(1, 1, 5, MASK)
    there.figures[0] = 9
    found = here.read(1, 1, 5)
    assert found is not None and found.tolist() == MASK.tolist() and here.figures[0] == 9


def test_a_mask_behind_drafts_is_read_behind_these_drafts_alone() -> None:
    memory = MaskMemory(2, VOCAB, drafts=3)
    run = np.array([5, 6], np.int32)
    memory.write(1, 7, 19, MASK)
    memory.write(1, 7, 19, ~MASK, run)
    found, first = memory.read(1, 7, 19, run), memory.read(1, 7, 19)
    assert found is not None and found.tolist() == (~MASK).tolist()
    assert first is not None and first.tolist() == MASK.tolist()
    for other in ([5], [5, 7], [6, 6], [5, 6, 7]):
        assert memory.read(1, 7, 19, np.array(other, np.int32)) is None, other
    assert (
        memory.read(1, 7, 20, run) is None and memory.read(1, 8, 19, run) is None and memory.read(0, 7, 19, run) is None
    )


def test_a_mask_of_before_with_as_many_drafts_is_not_taken() -> None:
    """The line is one of two drafts already when the row goes on, and its mask is that of the old ones."""
    memory = MaskMemory(1, VOCAB, drafts=3)
    memory.write(0, 7, 19, MASK, np.array([5, 6], np.int32))
    memory.write(0, 7, 20, ~MASK)
    assert memory.read(0, 7, 20, np.array([6, 6], np.int32)) is None
    assert memory.read(0, 7, 19, np.array([6, 6], np.int32)) is None


@pytest.mark.parametrize("together", [False, True])
def test_what_changes_behind_the_look_changes_no_verdict(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    """The worker writes another mask while a reader looks: at the tag, and then at what it is the tag of."""
    memory = MaskMemory(1, VOCAB, drafts=1)
    memory.write(0, 7, 19, MASK)
    checksums = mask_memory._checksums

    def written_meanwhile(lines: NDArray[np.int64]) -> NDArray[np.int64]:
        found = checksums(lines)
        monkeypatch.setattr(mask_memory, "_checksums", checksums)
        memory.write(0, 7, 20, ~MASK)
        return found

    monkeypatch.setattr(mask_memory, "_checksums", written_meanwhile)
    if together:
        there, masks = memory.read_next(np.array([0]), np.array([7]), np.array([19]))
        found = masks[0] if there[0] else None
    else:
        found = memory.read(0, 7, 19)
    assert found is not None and found.tolist() == MASK.tolist(), "a tag of one mask was taken for that of another"


def test_forced_tokens_are_read_from_where_the_row_has_come_to() -> None:
    memory = MaskMemory(2, VOCAB, drafts=3)
    assert memory.most_forced == 8
    memory.write_forced(1, 7, 19, [5, 6, 7, 8, 9])
    assert memory.read_forced(1, 7, 19, -1, 3).tolist() == [5, 6, 7]
    assert memory.read_forced(1, 7, 20, 5, 3).tolist() == [6, 7, 8]
    assert memory.read_forced(1, 7, 23, 8, 3).tolist() == [9]
    nothing = [(1, 7, 24, 9), (1, 7, 18, 5), (1, 7, 20, 4), (1, 8, 20, 5), (0, 7, 20, 5)]
    for slot, epoch, position, newest in nothing:
        assert not memory.read_forced(slot, epoch, position, newest, 3).size
    memory.write_forced(1, 7, 30, [])
    assert not memory.read_forced(1, 7, 30, 9, 3).size and not memory.read_forced(1, 7, 20, 5, 3).size


def test_forced_tokens_that_are_half_written_are_none() -> None:
    memory, other = MaskMemory(1, VOCAB, 3), MaskMemory(1, VOCAB, 3)
    memory.write_forced(0, 7, 19, [5, 6, 7, 8])
    other.write_forced(0, 7, 20, [6, 9])
    old, new = memory.forced[0].copy(), other.forced[0].copy()
    different = np.flatnonzero(old != new).tolist()
    for count in range(1, len(different)):
        for order in (different, different[::-1]):
            memory.forced[0] = old
            memory.forced[0][order[:count]] = new[order[:count]]
            assert not memory.read_forced(0, 7, 20, 5, 3).size
