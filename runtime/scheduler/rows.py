"""The host's truth about rows, one NumPy column a field, by row slot. The device never reads it."""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.scheduler.token_times import TokenTimes


class RowPhase(enum.IntEnum):
    FREE = 0  # nobody's
    PREFILL = 1  # tokens known at admission are left to plan
    DECODE = 2  # all of them are planned
    LEAVING = 3  # evicted: in no further plan, its tokens in flight still count
    FENCED = 4  # the row has ended; launches in flight may still name its slot


class Rows:
    """Columns [max_rows].

    Lengths are a pair. `committed_len` counts tokens that the host knows. `least_len` and `most_len` bound the tokens
    that the row has in the last F enqueued that holds it, if none of them ended the row: they differ only where a
    launch may bring more than one token, until its tokens are committed. `epoch` grows each time a slot changes hands
    or its row ends: a launch's row counts only while the epoch it was planned with is still the slot's. It begins at
    `epoch`, and like everything here that grows for as long as the engine runs it has 64 bits. `changes` grows each
    time a row begins, ends or moves on to another phase: while it stays, so do the rows that decode. `ended` counts
    those that have ended: while it stays, every row is what it was.
    """

    def __init__(self, max_rows: int, max_stop_ids: int, context_length: int, *, epoch: int = 0) -> None:
        self.max_rows = max_rows
        self.phase = np.zeros(max_rows, np.int8)
        self.epoch = np.full(max_rows, epoch, np.int64)
        self.prompt_len = np.zeros(max_rows, np.int32)
        self.known_len = np.zeros(max_rows, np.int32)  # tokens known when the row was admitted, to be prefilled
        self.committed_len = np.zeros(max_rows, np.int32)
        # One array, since a launch of rows that decode adds one to each. last_launch: the last launch whose F holds the
        # row. last_naming: the last launch that names its slot, the S after that F.
        self.planned = np.zeros((4, max_rows), np.int64)
        self.least_len, self.most_len, self.last_launch, self.last_naming = self.planned
        self.max_len = np.zeros(max_rows, np.int32)  # tokens of prompt and completion at which the row ends
        self.min_position = np.zeros(max_rows, np.int32)  # below it the stop ids are masked
        self.num_blocks = np.zeros(max_rows, np.int32)
        self.needs_full = np.zeros(max_rows, np.bool_)
        self.finite = np.ones(max_rows, np.bool_)  # no launch that has retired left the row a NaN or an infinity
        self.owner = np.zeros(max_rows, np.int64)  # which front end
        self.handle = np.zeros(max_rows, np.int64)  # the front end's name for the request
        self.logprobs = np.full(max_rows, -1, np.int32)
        self.prompt_logprobs = np.full(max_rows, -1, np.int32)  # as the device was told when the row began
        self.stop_ids = np.full((max_rows, max_stop_ids), -1, np.int32)
        self.stop_width = 0  # columns of stop_ids that any row has used
        self.token_times = TokenTimes(max_rows)  # when the request's last token was sent
        self.history = np.zeros((max_rows, context_length), np.int32)  # committed tokens by position
        self.changes = self.ended = 0
        self._free = list(range(max_rows - 1, -1, -1))  # popped from the end: low slots first

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def fenced(self) -> int:
        """Given up, or about to be, and still named by a launch in flight."""
        return int(np.count_nonzero(self.phase >= RowPhase.LEAVING))

    def take(self) -> int:
        """A free slot, in a new epoch."""
        slot = self._free.pop()
        self.epoch[slot] += 1
        return slot

    def enter(self, slot: int, phase: RowPhase) -> None:
        """The row begins, or moves on to another phase."""
        self.phase[slot] = phase
        self.changes += 1

    def fence(self, slot: int) -> None:
        """The row has ended: what launches in flight still say of it is void."""
        self.epoch[slot] += 1
        self.ended += 1
        self.enter(slot, RowPhase.FENCED)

    def release(self, slot: int) -> None:
        """The last launch that names the slot has retired."""
        if self.phase[slot] != RowPhase.FENCED:
            raise RuntimeError(f"row slot {slot} is released and was not fenced")
        self.phase[slot] = RowPhase.FREE
        self.num_blocks[slot] = 0
        self._free.append(slot)

    def still(self, slots: NDArray[np.int32] | NDArray[np.intp], epochs: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows of a launch are still what they were when it was planned. [n]"""
        return np.equal(self.epoch[slots], epochs)

    def check(self) -> None:
        """Conservation: every slot is in exactly one phase, and free ones are in the free list once."""
        if sorted(self._free) != np.flatnonzero(self.phase == RowPhase.FREE).tolist():
            raise RuntimeError("the free row slots are not those in phase FREE")
