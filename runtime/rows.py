"""The host's truth about rows, one NumPy column a field, by row slot. Pure. The device never reads it."""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray


class RowPhase(enum.IntEnum):
    FREE = 0  # nobody's
    PREFILL = 1  # prompt tokens are left to plan
    DECODE = 2  # every prompt token is planned
    FENCED = 3  # the row has ended; launches in flight may still name its slot


class Rows:
    """Columns [max_rows].

    Lengths are a pair: `committed_len` counts tokens that the host knows, `planned_len` those whose K and V will be
    there once every launch enqueued has run, the upper bound. `epoch` grows each time a slot changes hands or its row
    ends: a launch's row counts only while the epoch it was planned with is still the slot's.
    """

    def __init__(self, max_rows: int, max_stop_ids: int) -> None:
        self.max_rows = max_rows
        self.phase = np.zeros(max_rows, np.int8)
        self.epoch = np.zeros(max_rows, np.int32)
        self.prompt_len = np.zeros(max_rows, np.int32)
        self.planned_len = np.zeros(max_rows, np.int32)
        self.committed_len = np.zeros(max_rows, np.int32)
        self.max_len = np.zeros(max_rows, np.int32)  # tokens of prompt and completion at which the row ends
        self.min_position = np.zeros(max_rows, np.int32)  # below it the stop ids are masked
        self.last_token = np.zeros(max_rows, np.int32)  # the newest committed token
        self.num_blocks = np.zeros(max_rows, np.int32)
        self.last_launch = np.zeros(max_rows, np.int64)  # the last launch whose F holds the row
        self.last_naming = np.zeros(max_rows, np.int64)  # the last launch that names its slot: the S after that F
        self.needs_full = np.zeros(max_rows, np.bool_)
        self.owner = np.zeros(max_rows, np.int32)  # which front end
        self.handle = np.zeros(max_rows, np.int32)  # the front end's name for the request
        self.logprobs = np.full(max_rows, -1, np.int32)
        self.stop_ids = np.full((max_rows, max_stop_ids), -1, np.int32)
        self.stop_width = 0  # columns of stop_ids that any row has used
        self._free = list(range(max_rows - 1, -1, -1))  # popped from the end: low slots first

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def fenced(self) -> int:
        return int(np.count_nonzero(self.phase == RowPhase.FENCED))

    def take(self) -> int:
        """A free slot, in a new epoch."""
        slot = self._free.pop()
        self.epoch[slot] += 1
        return slot

    def fence(self, slot: int) -> None:
        """The row has ended: what launches in flight still say of it is void."""
        self.epoch[slot] += 1
        self.phase[slot] = RowPhase.FENCED

    def release(self, slot: int) -> None:
        """The last launch that names the slot has retired."""
        if self.phase[slot] != RowPhase.FENCED:
            raise RuntimeError(f"row slot {slot} is released and was not fenced")
        self.phase[slot] = RowPhase.FREE
        self.num_blocks[slot] = 0
        self._free.append(slot)

    def still(self, slots: NDArray[np.int32], epochs: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which rows of a launch are still what they were when it was planned. [n]"""
        return np.equal(self.epoch[slots], epochs)

    def check(self) -> None:
        """Conservation: every slot is in exactly one phase, and free ones are in the free list once."""
        if sorted(self._free) != np.flatnonzero(self.phase == RowPhase.FREE).tolist():
            raise RuntimeError("the free row slots are not those in phase FREE")
