"""The host's row state: one NumPy column for each field, by row slot. The device never reads it.

`new_row` writes what is fixed when a row begins (its limits, stop ids and owner) together with the admission record.
Methods of `Rows` write everything else.
"""

from __future__ import annotations

import enum
import heapq

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.wire.engine_config import MOST_DRAFTS


class RowPhase(enum.IntEnum):
    FREE = 0  # no request has it
    PREFILL = 1  # some tokens known at admission are not planned yet
    DECODE = 2  # all tokens known at admission are planned
    LEAVING = 3  # evicted: in no later plan; its tokens in flight still count
    FENCED = 4  # the row has ended; launches in flight may still name its slot


_DECODE = int(RowPhase.DECODE)  # members of an enum are looked up slowly
_DRAFT_INDEXES = np.arange(MOST_DRAFTS)  # draft positions


class Rows:
    """Columns [max_rows] or [max_rows, n].

    Lengths are a pair. `committed_len` counts tokens that the host knows. `least_len` and `most_len` bound the row's
    tokens in its newest enqueued F, if no launch ended the row: they differ only while an uncommitted launch may bring
    more tokens than one, or none. `state_len` is the number of tokens that the row's recurrent state certainly covers
    after that F; the next F adds accepted drafts. `epoch` grows each time a slot changes hands or its row ends: a row
    of a launch counts only while the epoch is the one that it was planned with. Everything that grows with the engine's
    life has 64 bits. `changes` grows each time a row begins, ends or changes its phase, and when a commit shows fewer
    tokens than a row might have had: while it stays the same, the decoding rows stay the same, and each launch advances
    them by one token. `ended` counts ended rows.
    """

    def __init__(self, max_rows: int, max_stop_ids: int, context_length: int, *, epoch: int = 0) -> None:
        self.max_rows = max_rows
        self.phase = np.zeros(max_rows, np.int8)
        self.epoch = np.full(max_rows, epoch, np.int64)
        self.prompt_len = np.zeros(max_rows, np.int32)
        self.known_len = np.zeros(max_rows, np.int32)  # tokens known when the row was admitted, to be prefilled
        self.committed_len = np.zeros(max_rows, np.int32)
        # One array, since a decode launch adds one to each. last_launch: the last launch whose F has the
        # row. last_naming: the last launch that names its slot, the S after that F.
        self.planned = np.zeros((5, max_rows), np.int64)
        self.least_len, self.most_len, self.state_len, self.last_launch, self.last_naming = self.planned
        self.drafts = np.zeros(max_rows, np.int32)  # guessed query tokens of its last F
        # The S after its last F held it, and no later launch has it: its bounds are one less than F has computed.
        self.waits = np.zeros(max_rows, np.bool_)
        self.first_sample = np.zeros(max_rows, np.int64)  # the first launch whose S samples the row
        # Since the row began, by draft position: verified drafts, and accepted ones.
        self.drafted, self.accepted = np.zeros((2, max_rows, MOST_DRAFTS), np.int64)
        self.max_len = np.zeros(max_rows, np.int32)  # tokens of prompt and completion at which the row ends
        self.min_position = np.zeros(max_rows, np.int32)  # below it the stop ids are masked
        self.num_blocks = np.zeros(max_rows, np.int32)
        self.needs_full = np.zeros(max_rows, np.bool_)
        self.may_hold = np.zeros(max_rows, np.bool_)  # it has a grammar: S holds the row if its mask is late
        self.finite = np.ones(max_rows, np.bool_)  # no launch that has retired left the row a NaN or an infinity
        self.order = np.zeros(max_rows, np.int64)  # the request's number in order of submission
        self.owner = np.zeros(max_rows, np.int64)  # the front end's number
        self.handle = np.zeros(max_rows, np.int64)  # the front end's number for the request
        self.logprobs = np.full(max_rows, -1, np.int32)
        self.prompt_logprobs = np.full(max_rows, -1, np.int32)  # as in the row's admission record
        self.stop_ids = np.full((max_rows, max_stop_ids), -1, np.int32)
        self.stop_width = 0  # columns of stop_ids that any row has used
        self.history = np.zeros((max_rows, context_length), np.int32)  # committed tokens by position
        self._history = self.history.reshape(-1)  # the same, flattened
        self.changes = self.ended = 0
        self._free = list(range(max_rows))  # a heap: low slots first, since some devices support more features for them

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def fenced(self) -> int:
        """Number of row slots that are given up, or about to be, and still named by a launch in flight."""
        return int(np.count_nonzero(self.phase >= RowPhase.LEAVING))

    def allocate(self) -> int:
        """Return the lowest free row slot, in a new epoch."""
        slot = heapq.heappop(self._free)
        self.epoch[slot] += 1
        return slot

    # ------------------------------------------------------------ phases

    def begin(self, slot: int, tokens: NDArray[np.int32], num_blocks: int, cached: int) -> None:
        """Give the slot to a request. tokens: all its known tokens, [n]. cached: how many of them its first
        `num_blocks`, shared blocks hold."""
        self.enter(slot, RowPhase.PREFILL)
        self.known_len[slot] = self.committed_len[slot] = tokens.size
        self.history[slot, : tokens.size] = tokens
        self.num_blocks[slot] = num_blocks
        self.least_len[slot] = self.most_len[slot] = self.state_len[slot] = cached
        self.drafts[slot] = self.drafted[slot] = self.accepted[slot] = 0
        self.waits[slot] = False
        self.finite[slot] = True

    def enter(self, slot: int, phase: RowPhase) -> None:
        """Set the row's phase."""
        self.phase[slot] = phase
        self.changes += 1

    def fence(self, slot: int) -> None:
        """End the row: its tokens in launches in flight are void."""
        self.epoch[slot] += 1
        self.ended += 1
        self.enter(slot, RowPhase.FENCED)

    def release(self, slot: int) -> None:
        """Free a slot when the last launch that names it has retired."""
        if self.phase[slot] != RowPhase.FENCED:
            raise RuntimeError(f"row slot {slot} is released and was not fenced")
        self.phase[slot] = RowPhase.FREE
        self.num_blocks[slot] = 0
        heapq.heappush(self._free, slot)

    # ------------------------------------------------------------ planned

    def plan_chunk(self, slot: int, end: int, number: int) -> None:
        """Plan a chunk: F of launch `number` computes the prompt up to `end`."""
        self.least_len[slot] = self.most_len[slot] = self.state_len[slot] = end
        self.first_sample[slot] = number + 1  # the last chunk's value remains

    def decoding(self) -> NDArray[np.int64]:
        """Return the rows that may decode: their least length leaves room for another token. [n]"""
        slots: NDArray[np.int64] = ((self.phase == _DECODE) & (self.least_len < self.max_len - 1)).nonzero()[0]
        return slots

    def plan_decode(
        self,
        slots: NDArray[np.int64],
        least_len: NDArray[np.int64],
        most_len: NDArray[np.int64],
        drafts: NDArray[np.int64] | int,
    ) -> None:
        """Set the lengths of these rows after the next F, and their drafts in it. [n], [n], [n], [n]"""
        self.least_len[slots] = self.state_len[slots] = least_len
        self.most_len[slots] = most_len
        self.drafts[slots] = drafts
        self.waits[slots] = False

    def note_launch(self, slots: NDArray[np.intp], number: int, samples: NDArray[np.bool_]) -> None:
        """Record that launch `number` has these rows. samples: rows that the next S samples. [n], [n]"""
        self.last_launch[slots] = number
        self.last_naming[slots] = number + samples

    def plan_one_more(self, step: NDArray[np.int64]) -> None:
        """Advance the rows of the previous launch by one token. step: as `planned`."""
        self.planned += step

    def set_num_blocks(self, slot: int, count: int) -> None:
        """Set the row's number of blocks."""
        self.num_blocks[slot] = count

    def add_block(self, slots: NDArray[np.int64]) -> None:
        """Count one more block for each of these rows. [n]"""
        self.num_blocks[slots] += 1

    # ------------------------------------------------------------ committed

    def commit(self, slots: NDArray[np.intp], positions: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """Record committed tokens, the tokens of a row in their order. [n], [n], [n]"""
        self.history[slots, positions] = tokens
        self.committed_len[slots] = positions + 1  # with several tokens of a row the last one's length remains

    def commit_one_each(self, indexes: NDArray[np.int64], tokens: NDArray[np.int32], step: NDArray[np.int32]) -> None:
        """Record one committed token for each of n rows.

        indexes: into `history`, flattened. [n], [n] step: 1 for these rows. [max_rows]
        """
        self._history[indexes] = tokens
        self.committed_len += step

    def correct_bounds(
        self, slots: NDArray[np.intp], number: int, brought: NDArray[np.int64], allowed: NDArray[np.int64] | int = 0
    ) -> None:
        """Tighten the length bounds of these rows after the commit of launch `number`.

        brought: tokens of each row. allowed: how many of the drafts it might have kept. [n], [n], [n] A row without a
        later plan was allowed nothing yet: the next plan allows one token.
        """
        planned = self.last_launch[slots] >= number
        if not np.minimum.reduce(brought, initial=1):
            self.waits[slots[(brought == 0) & ~planned]] = True
        least, most = brought - 1 + (planned & self.may_hold[slots]), brought - 1 - np.where(planned, allowed, 0)
        self.changes += bool(np.count_nonzero(most))
        self.least_len[slots] += least
        self.most_len[slots] += most
        self.state_len[slots] += least * planned  # only this launch's F or a later one extends it

    def drop_drafts(self, slots: NDArray[np.int32]) -> None:
        """Remove the drafts of these rows from the next F. [n]"""
        self.drafts[slots] = 0

    def count_drafts(self, slots: NDArray[np.intp], drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Count verified and accepted drafts of these rows. [n], [n], [n]"""
        self.drafted[slots] += drafted[:, None] > _DRAFT_INDEXES
        self.accepted[slots] += accepted[:, None] > _DRAFT_INDEXES

    def forget_last_token(self, slot: int) -> None:
        """Exclude the last token of an ended row: it is never forwarded, so a block that only it would fill is not
        full."""
        self.least_len[slot] = min(self.least_len[slot], self.committed_len[slot] - 1)

    def end_states(self, slots: NDArray[np.intp], lengths: NDArray[np.int64]) -> None:
        """Bound the state lengths of rows that ended in an S by their lengths in the F before. [n], [n]"""
        self.state_len[slots] = np.minimum(self.state_len[slots], lengths)

    def not_finite(self, slots: int | NDArray[np.int32]) -> None:
        """Record that a launch left these rows a NaN or an infinity. [n]"""
        self.finite[slots] = False

    # ------------------------------------------------------------ read

    def still(self, slots: NDArray[np.int32] | NDArray[np.intp], epochs: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows of a launch still have the epoch that they were planned with. [n]"""
        return np.equal(self.epoch[slots], epochs)

    def check(self) -> None:
        """Raise RuntimeError unless every slot has exactly one phase and the free list has each free slot once."""
        if sorted(self._free) != np.flatnonzero(self.phase == RowPhase.FREE).tolist():
            raise RuntimeError("the free row slots are not those in phase FREE")
