"""A line of masks is read whole, and only as what it was written for."""

from __future__ import annotations

import os

import numpy as np
import pytest

from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.token_mask import token_mask

VOCAB = 100
MASK = token_mask((3, 64, 99), VOCAB)


def test_a_mask_is_read_as_it_was_written() -> None:
    memory = MaskMemory(4, VOCAB)
    memory.write(2, 7, 19, MASK)
    found = memory.read(2, 7, 19)
    assert found is not None and found.tolist() == MASK.tolist()
    memory.write(2, 7, 20, ~MASK)
    assert found.tolist() == MASK.tolist(), "what was read once changes no more"


@pytest.mark.parametrize(("slot", "epoch", "position"), [(2, 8, 19), (2, 7, 20), (2, 7, 18), (1, 7, 19)])
def test_nobody_reads_the_mask_of_another_row_or_position(slot: int, epoch: int, position: int) -> None:
    """The row that had the slot before may have been at the same position."""
    memory = MaskMemory(4, VOCAB)
    memory.write(2, 7, 19, MASK)
    assert memory.read(slot, epoch, position) is None


def test_memory_that_nobody_has_written_holds_no_mask() -> None:
    assert MaskMemory(4, VOCAB).read(0, 0, 0) is None


def test_a_line_that_is_half_written_is_no_mask() -> None:
    """Whatever word of the old line is still there, or of the new one already."""
    memory, other = MaskMemory(1, VOCAB), MaskMemory(1, VOCAB)
    memory.write(0, 7, 19, MASK)
    other.write(0, 7, 20, token_mask((1, 40, 80, 96), VOCAB))
    old, new = memory._lines[0].copy(), other._lines[0].copy()
    different = np.flatnonzero(old != new).tolist()
    assert len(different) >= 4
    for count in range(1, len(different)):
        for order in (different, different[::-1]):
            memory._lines[0] = old
            memory._lines[0][order[:count]] = new[order[:count]]
            for position in (19, 20):
                assert memory.read(0, 7, position) is None, "words of two lines were taken for one"


def test_processes_share_a_file() -> None:
    file = os.memfd_create("masks")
    os.truncate(file, MaskMemory.size(3, VOCAB))
    here, there = MaskMemory(3, VOCAB, file), MaskMemory(3, VOCAB, file)
    os.close(file)
    there.write(1, 1, 5, MASK)
    there.figures[0] = 9
    found = here.read(1, 1, 5)
    assert found is not None and found.tolist() == MASK.tolist() and here.figures[0] == 9
