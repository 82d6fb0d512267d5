"""The host's truth about rows, one NumPy column a field, by row slot. The device never reads it.

What is fixed when a row begins (its limits, its stop ids, whose it is) is written by `new_row`, beside the record that
tells the device the same. Everything else is written by methods of `Rows`.
"""

from __future__ import annotations

import enum
import heapq

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.scheduler.token_times import TokenTimes
from runahead.runtime.wire.engine_config import MOST_DRAFTS


class RowPhase(enum.IntEnum):
    FREE = 0  # nobody's
    PREFILL = 1  # tokens known at admission are left to plan
    DECODE = 2  # all of them are planned
    LEAVING = 3  # evicted: in no further plan, its tokens in flight still count
    FENCED = 4  # the row has ended; launches in flight may still name its slot


_DECODE = int(RowPhase.DECODE)  # members of an enum are looked up slowly
_PLACES = np.arange(MOST_DRAFTS)  # of drafts in a run


class Rows:
    """Columns [max_rows], or [max_rows, n].

    Lengths are a pair. `committed_len` counts tokens that the host knows. `least_len` and `most_len` bound the tokens
    that the row has in the last F enqueued that holds it, if none of them ended the row: they differ only where a
    launch may bring more tokens than one or none, until its tokens are committed. `state_len` is how many tokens the
    row's recurrent state is sure to stand for when that F has ended: the row's next F brings drafts into it that S has
    kept. `epoch` grows each time a slot changes hands or its row ends: a launch's row counts only while the epoch it
    was planned with is still the slot's. It begins at `epoch`, and like everything here that grows for as long as the
    engine runs it has 64 bits. `changes` grows each time a row begins, ends or moves on to another phase, and where a
    commit shows that a row has fewer tokens than it might have had: while it stays the same, so do the rows that
    decode, and each launch takes them one token further. `ended` counts rows that have ended.
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
        self.planned = np.zeros((5, max_rows), np.int64)
        self.least_len, self.most_len, self.state_len, self.last_launch, self.last_naming = self.planned
        self.drafts = np.zeros(max_rows, np.int32)  # query tokens of its last F that were guessed
        # The S after its last F has held it, and no launch has it since: its bounds are one less than F has computed.
        self.waits = np.zeros(max_rows, np.bool_)
        self.first_sample = np.zeros(max_rows, np.int64)  # the launch whose S looks first at logits of the row
        # Since the row began, by their place in a run: drafts that launches have looked at, and right ones.
        self.drafted, self.accepted = np.zeros((2, max_rows, MOST_DRAFTS), np.int64)
        self.max_len = np.zeros(max_rows, np.int32)  # tokens of prompt and completion at which the row ends
        self.min_position = np.zeros(max_rows, np.int32)  # below it the stop ids are masked
        self.num_blocks = np.zeros(max_rows, np.int32)
        self.needs_full = np.zeros(max_rows, np.bool_)
        self.may_hold = np.zeros(max_rows, np.bool_)  # its tokens wait for something, and S may find that it is late
        self.finite = np.ones(max_rows, np.bool_)  # no launch that has retired left the row a NaN or an infinity
        self.order = np.zeros(max_rows, np.int64)  # the request's place among all that were submitted
        self.owner = np.zeros(max_rows, np.int64)  # which front end
        self.handle = np.zeros(max_rows, np.int64)  # the front end's name for the request
        self.logprobs = np.full(max_rows, -1, np.int32)
        self.prompt_logprobs = np.full(max_rows, -1, np.int32)  # as the device was told when the row began
        self.stop_ids = np.full((max_rows, max_stop_ids), -1, np.int32)
        self.stop_width = 0  # columns of stop_ids that any row has used
        self.token_times = TokenTimes(max_rows)  # when the request's last token was sent
        self.history = np.zeros((max_rows, context_length), np.int32)  # committed tokens by position
        self._history = self.history.reshape(-1)  # the same, one row behind the other
        self.changes = self.ended = 0
        self._free = list(range(max_rows))  # a heap: a device may do more for rows in the lowest slots

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def fenced(self) -> int:
        """Given up, or about to be, and still named by a launch in flight."""
        return int(np.count_nonzero(self.phase >= RowPhase.LEAVING))

    def allocate(self) -> int:
        """The lowest free row slot, in a new epoch."""
        slot = heapq.heappop(self._free)
        self.epoch[slot] += 1
        return slot

    # ------------------------------------------------------------ phases

    def begin(self, slot: int, tokens: NDArray[np.int32], num_blocks: int, cached: int) -> None:
        """A request has the slot. tokens: all that are known of it, [n]. cached: how many of them, the first ones, the
        `num_blocks` blocks hold that it shares with others."""
        self.enter(slot, RowPhase.PREFILL)
        self.known_len[slot] = self.committed_len[slot] = tokens.size
        self.history[slot, : tokens.size] = tokens
        self.num_blocks[slot] = num_blocks
        self.least_len[slot] = self.most_len[slot] = self.state_len[slot] = cached
        self.drafts[slot] = self.drafted[slot] = self.accepted[slot] = 0
        self.waits[slot] = False
        self.finite[slot] = True

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
        heapq.heappush(self._free, slot)

    # ------------------------------------------------------------ planned

    def plan_chunk(self, slot: int, end: int, number: int) -> None:
        """F of launch `number` takes the row's prompt up to here."""
        self.least_len[slot] = self.most_len[slot] = self.state_len[slot] = end
        self.first_sample[slot] = number + 1  # that of the last chunk stays

    def decoding(self) -> NDArray[np.int64]:
        """Rows that may go on decoding: the fewest tokens that they can have leave them room for one more. [n]"""
        slots: NDArray[np.int64] = ((self.phase == _DECODE) & (self.least_len < self.max_len - 1)).nonzero()[0]
        return slots

    def plan_decode(
        self,
        slots: NDArray[np.int64],
        least_len: NDArray[np.int64],
        most_len: NDArray[np.int64],
        drafts: NDArray[np.int64] | int,
    ) -> None:
        """The next F takes these rows to these lengths, and has so many drafts of each. [n], [n], [n], [n]"""
        self.least_len[slots] = self.state_len[slots] = least_len
        self.most_len[slots] = most_len
        self.drafts[slots] = drafts
        self.waits[slots] = False

    def note_launch(self, slots: NDArray[np.intp], number: int, samples: NDArray[np.bool_]) -> None:
        """Launch `number` holds these rows. samples: those that the S after it looks at. [n], [n]"""
        self.last_launch[slots] = number
        self.last_naming[slots] = number + samples

    def plan_one_more(self, step: NDArray[np.int64]) -> None:
        """The next launch holds the rows of the one before, one token further. step: as `planned`."""
        self.planned += step

    def hold_blocks(self, slot: int, count: int) -> None:
        """The row holds so many blocks."""
        self.num_blocks[slot] = count

    def hold_one_more_block(self, slots: NDArray[np.int64]) -> None:
        """Each of these rows holds one block more. [n]"""
        self.num_blocks[slots] += 1

    # ------------------------------------------------------------ committed

    def commit(self, slots: NDArray[np.intp], positions: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """These tokens are kept. Several of a row come in their order. [n], [n], [n]"""
        self.history[slots, positions] = tokens
        self.committed_len[slots] = positions + 1  # of several tokens of a row the last one's length stays

    def commit_one_each(self, places: NDArray[np.int64], tokens: NDArray[np.int32], step: NDArray[np.int32]) -> None:
        """A token of each of n rows is kept. places: in `history`, one row behind the other. [n], [n]

        step: 1 for these rows. [max_rows]
        """
        self._history[places] = tokens
        self.committed_len += step

    def correct_bounds(
        self, slots: NDArray[np.intp], number: int, brought: NDArray[np.int64], allowed: NDArray[np.int64] | int = 0
    ) -> None:
        """Launch `number` is committed, and has brought so many tokens of these rows: the bounds of their lengths come
        together. allowed: how many of the drafts it might have kept. [n], [n], [n]

        A row that is in no plan from this launch on was allowed for nothing yet: the next plan allows for one token.
        """
        planned = self.last_launch[slots] >= number
        if not np.minimum.reduce(brought, initial=1):
            self.waits[slots[(brought == 0) & ~planned]] = True
        least, most = brought - 1 + (planned & self.may_hold[slots]), brought - 1 - np.where(planned, allowed, 0)
        self.changes += bool(np.count_nonzero(most))
        self.least_len[slots] += least
        self.most_len[slots] += most
        self.state_len[slots] += least * planned  # only the F of a launch from that one on brings it further

    def drop_drafts(self, slots: NDArray[np.int32]) -> None:
        """The next F has these rows without drafts. [n]"""
        self.drafts[slots] = 0

    def count_drafts(self, slots: NDArray[np.intp], drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """A launch has looked at so many drafts of these rows, and so many of them were right. [n], [n], [n]"""
        self.drafted[slots] += drafted[:, None] > _PLACES
        self.accepted[slots] += accepted[:, None] > _PLACES

    def forget_last_token(self, slot: int) -> None:
        """The row has ended: nobody forwards its last token, and a block that only this would fill is not full."""
        self.least_len[slot] = min(self.least_len[slot], self.committed_len[slot] - 1)

    def end_states(self, slots: NDArray[np.intp], lengths: NDArray[np.int64]) -> None:
        """The rows have ended in an S, and had these lengths in the F before: their states stand for no more.
        [n], [n]"""
        self.state_len[slots] = np.minimum(self.state_len[slots], lengths)

    def not_finite(self, slots: int | NDArray[np.int32]) -> None:
        """A launch has left these rows a NaN or an infinity. [n]"""
        self.finite[slots] = False

    # ------------------------------------------------------------ looked at

    def still(self, slots: NDArray[np.int32] | NDArray[np.intp], epochs: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows of a launch are still what they were when it was planned. [n]"""
        return np.equal(self.epoch[slots], epochs)

    def check(self) -> None:
        """Conservation: every slot is in exactly one phase, and free ones are in the free list once."""
        if sorted(self._free) != np.flatnonzero(self.phase == RowPhase.FREE).tolist():
            raise RuntimeError("the free row slots are not those in phase FREE")
