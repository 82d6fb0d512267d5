"""A line of masks is read whole, and only as what it was written for."""

from __future__ import annotations

import os

import numpy as np
import pytest
from numpy.typing import NDArray

from runahead.runtime.masks import mask_memory
from runahead.runtime.masks.mask_memory import NO_RUN, MaskMemory
from runahead.runtime.row_record import token_mask
from tests.runtime.masks.one_row import read_mask, write_mask

VOCAB = 100
MASK = token_mask((3, 64, 99), VOCAB)


def read(memory: MaskMemory, slot: int, epoch: int, position: int) -> list[int] | None:
    """The mask of a row's next position, read beside that of row slot 0, and read alone."""
    slots, epochs, positions = np.array([0, slot]), np.array([9, epoch]), np.array([9, position], np.int32)
    there, masks = memory.read_next(slots, epochs, positions)
    alone = read_mask(memory, slot, epoch, position)
    found = None if alone is None else alone.tolist()
    assert found == (masks[1].tolist() if there[1] else None)
    return found


def test_a_mask_is_read_as_it_was_written() -> None:
    memory, run = MaskMemory(4, VOCAB, drafts=1), np.array([5], np.int32)
    write_mask(memory, 2, 7, 19, MASK)
    write_mask(memory, 2, 7, 19, ~MASK, run)
    assert read(memory, 2, 7, 19) == MASK.tolist()
    found, behind = read_mask(memory, 2, 7, 19), read_mask(memory, 2, 7, 19, run)
    write_mask(memory, 2, 7, 20, ~MASK)
    write_mask(memory, 2, 7, 20, MASK, run)
    assert found is not None and found.tolist() == MASK.tolist(), "what was read once changes no more"
    assert behind is not None and behind.tolist() == (~MASK).tolist()


def test_masks_of_several_rows_are_written_at_once_as_they_are_one_by_one() -> None:
    together, alone = MaskMemory(4, VOCAB, drafts=2), MaskMemory(4, VOCAB, drafts=2)
    tags, masks = np.array([(3, 7, 19), (0, 8, 4)]), np.stack([MASK, ~MASK])
    together.write_next(tags, masks)
    for (slot, epoch, position), mask in zip(tags.tolist(), masks, strict=True):
        write_mask(alone, slot, epoch, position, mask)
    assert np.array_equal(together.words, alone.words)


def test_a_row_of_a_service_that_has_run_for_years_has_its_mask() -> None:
    """Epochs are launches' numbers."""
    memory = MaskMemory(4, VOCAB)
    write_mask(memory, 2, 7 << 40, 19, MASK)
    assert read(memory, 2, 7 << 40, 19) == MASK.tolist()
    assert read(memory, 2, 0, 19) is None


@pytest.mark.parametrize(("slot", "epoch", "position"), [(2, 8, 19), (2, 7, 20), (2, 7, 18), (1, 7, 19)])
def test_nobody_reads_the_mask_of_another_row_or_position(slot: int, epoch: int, position: int) -> None:
    """The row that had the slot before may have been at the same position."""
    memory = MaskMemory(4, VOCAB)
    write_mask(memory, 2, 7, 19, MASK)
    assert read(memory, slot, epoch, position) is None


def test_memory_that_nobody_has_written_holds_no_mask() -> None:
    assert read(MaskMemory(4, VOCAB), 1, 0, 0) is None


def test_a_line_that_is_half_written_is_no_mask() -> None:
    """Whatever word of the old line is still there, or of the new one already."""
    memory, other = MaskMemory(2, VOCAB), MaskMemory(2, VOCAB)
    write_mask(memory, 1, 7, 19, MASK)
    write_mask(other, 1, 7, 20, token_mask((1, 40, 80, 96), VOCAB))
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
    write_mask(there, 1, 1, 5, MASK)
    there.figures[0] = 9
    found = read_mask(here, 1, 1, 5)
    assert found is not None and found.tolist() == MASK.tolist() and here.figures[0] == 9


def test_a_mask_behind_drafts_is_read_behind_these_drafts_alone() -> None:
    memory = MaskMemory(2, VOCAB, drafts=3)
    run = np.array([5, 6], np.int32)
    write_mask(memory, 1, 7, 19, MASK)
    write_mask(memory, 1, 7, 19, ~MASK, run)
    found, first = read_mask(memory, 1, 7, 19, run), read_mask(memory, 1, 7, 19)
    assert found is not None and found.tolist() == (~MASK).tolist()
    assert first is not None and first.tolist() == MASK.tolist()
    for other in ([5], [5, 7], [6, 6], [5, 6, 7]):
        assert read_mask(memory, 1, 7, 19, np.array(other, np.int32)) is None, other
    for slot, epoch, position in ((1, 7, 20), (1, 8, 19), (0, 7, 19)):
        assert read_mask(memory, slot, epoch, position, run) is None


def test_a_mask_of_before_with_as_many_drafts_is_not_taken() -> None:
    """The line is one of two drafts already when the row goes on, and its mask is that of the old ones."""
    memory = MaskMemory(1, VOCAB, drafts=3)
    write_mask(memory, 0, 7, 19, MASK, np.array([5, 6], np.int32))
    write_mask(memory, 0, 7, 20, ~MASK)
    assert read_mask(memory, 0, 7, 20, np.array([6, 6], np.int32)) is None
    assert read_mask(memory, 0, 7, 19, np.array([6, 6], np.int32)) is None


@pytest.mark.parametrize("run", [NO_RUN, np.array([5], np.int32)], ids=["next", "behind"])
def test_what_changes_behind_the_look_changes_no_verdict(
    monkeypatch: pytest.MonkeyPatch, run: NDArray[np.int32]
) -> None:
    """The worker writes another mask while a reader looks: at the tag, and then at what it is the tag of."""
    memory = MaskMemory(1, VOCAB, drafts=1)
    write_mask(memory, 0, 7, 19, MASK, run)
    checksums = mask_memory._checksums

    def written_meanwhile(lines: NDArray[np.int64]) -> NDArray[np.int64]:
        found = checksums(lines)
        monkeypatch.setattr(mask_memory, "_checksums", checksums)
        write_mask(memory, 0, 7, 20, ~MASK, run)
        return found

    monkeypatch.setattr(mask_memory, "_checksums", written_meanwhile)
    found = read_mask(memory, 0, 7, 19, run)
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
