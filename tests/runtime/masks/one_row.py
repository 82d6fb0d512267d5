"""The mask of one place of one row, written and read by the functions that the mask worker and S have for it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.masks.mask_memory import NO_RUN, MaskMemory


def write_mask(
    memory: MaskMemory, slot: int, epoch: int, position: int, mask: NDArray[np.int32], run: NDArray[np.int32] = NO_RUN
) -> None:
    """As `MaskMemory.write_behind`; without drafts, that of the row's next position."""
    if run.size:
        memory.write_behind(slot, epoch, position, mask, run)
    else:
        memory.write_next(np.array([(slot, epoch, position)], np.int64), mask[None])


def read_mask(
    memory: MaskMemory, slot: int, epoch: int, position: int, run: NDArray[np.int32] = NO_RUN
) -> NDArray[np.int32] | None:
    """As `MaskMemory.read_behind`; without drafts, that of the row's next position."""
    if run.size:
        return memory.read_behind(slot, epoch, position, run)
    there, masks = memory.read_next(np.array([slot]), np.array([epoch]), np.array([position], np.int32))
    return masks[0] if there[0] else None
