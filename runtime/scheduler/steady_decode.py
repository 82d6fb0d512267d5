"""Steady decode: consecutive launches of the same rows, planned and committed from values that are derived once.

While no row begins, ends or changes its phase, each launch advances the same rows by one token. The row list, the
epochs, the rows that cross a block boundary with each launch, and the last launch that can have all the rows are
derived from the columns once. Rows that S may hold are planned as if S held none; a commit with a held row ends steady
decode.

While the rows stay the same and none ends, most of a commit is also the same each time: its requests, its positions in
the history, that no token is a first one, and the launch with which a row reaches its greatest length. Only the cells
are new. An admission changes none of this: the launch that admits a row still samples the previous launch's rows.

The times between their tokens are the same for all of them.
"""

from __future__ import annotations

import math
import sys
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import only_tokens
from runahead.runtime.plan import LaunchPlan
from runahead.runtime.scheduler.ledger import Launch
from runahead.runtime.scheduler.outcomes import Commit
from runahead.runtime.scheduler.rows import Rows

_LEAST_AND_STATE: Final = np.array([[0], [2]])  # `least_len` and `state_len` in `Rows.planned`


class SteadyDecode:
    """The launches after one, as long as its rows decode on.

    plan: the launch before the first. It has all rows, and all of them are sampled next. rows: their state after that
    plan, for launches that bring one token; both bounds of each length are equal, except for rows that S may hold.
    until: the last launch at most.
    """

    __slots__ = (
        "_block_size",
        "_changes",
        "_crosses_at",
        "_crossing",
        "_first",
        "_rows",
        "_slots",
        "_until",
        "_with_room",
        "last",
        "masked",
        "needs_full",
        "plan",
        "step",
    )

    def __init__(self, plan: LaunchPlan, rows: Rows, block_size: int, until: int = sys.maxsize) -> None:
        self.plan = plan
        self._rows = rows
        self._block_size = block_size
        self._first = plan.number + 1
        self._until = until
        self._changes = rows.changes

    def advance_to(self, number: int) -> bool:
        """Advance to launch `number`, the next one. Returns whether it has exactly the same rows, apart from
        admissions.

        The first call derives the values for all later launches, not the constructor: the turn before may have admitted
        rows and has enough work.
        """
        if number < self._first or self._changes != self._rows.changes:
            return False
        if number == self._first:
            self._derive()
        return number <= self.last

    def _derive(self) -> None:
        """Derive what all launches of steady decode have in common."""
        self.plan.rows.setflags(write=False)  # launches share them from now on
        self.plan.samples.setflags(write=False)
        rows, size, slots = self._rows, self._block_size, self.plan.rows.astype(np.int64)
        lengths, ends = rows.most_len[slots], rows.max_len[slots]
        self.needs_full = bool(np.count_nonzero(rows.needs_full[slots]))
        self.masked = bool(np.count_nonzero(rows.may_hold[slots]))
        self.step = np.zeros_like(rows.planned)  # the increment of a launch
        self.step[:, slots] = 1
        # The least length of a row that S may hold grows when its token is committed.
        self.step[_LEAST_AND_STATE, slots[rows.may_hold[slots]]] = 0
        # The last token of a row is never forwarded: no launch has a row of the greatest length.
        self.last = min(self._until, self.plan.number + int(np.minimum.reduce(ends - 1 - lengths)))
        # A row crosses a block boundary with this launch, and with every block_size-th after it. [n]
        self._crosses_at = rows.num_blocks[slots] * size - lengths + self._first
        # Up to this launch some row has room for more than a block: it was held, or had drafts, at a block boundary.
        room_until = int(np.maximum.reduce(self._crosses_at))
        self._with_room = room_until if room_until >= self._first + size else 0
        self._slots = slots
        self._crossing: list[NDArray[np.int64] | None] = [None] * size

    def crossing(self, number: int) -> NDArray[np.int64]:
        """Return the slots of the rows that cross a block boundary with this launch, ascending."""
        size = len(self._crossing)
        if number < self._with_room:
            since = number - self._crosses_at
            crossing: NDArray[np.int64] = self._slots[(since >= 0) & (since % size == 0)]
            return crossing
        index = number % size
        found = self._crossing[index]
        if found is None:
            found = self._crossing[index] = self._slots[self._crosses_at % size == index]
        return found


class KeptRows:
    """What the commits after one have in common.

    launch, commit: the previous launch, without drafts. It kept a token of each of its rows, ended none, and its F has
    the same rows: its `row_slots` are its `sample_slots`.
    """

    __slots__ = (
        "_columns",
        "_ended",
        "_firsts",
        "_history_indexes",
        "_last",
        "_may_hold",
        "_one_each",
        "_rows",
        "_slots",
        "_step",
        "_stops",
    )

    def __init__(self, launch: Launch, commit: Commit, rows: Rows) -> None:
        slots = launch.sample_slots.astype(np.int64)
        lengths = rows.committed_len[slots]
        self._rows = rows
        self._ended = rows.ended
        self._slots = launch.sample_slots
        self._columns = commit
        self._firsts = np.zeros(slots.size, np.bool_)
        shortest = int(np.minimum.reduce(rows.max_len[slots] - lengths))
        self._last = launch.number + shortest - 1  # with the next one a row ends by its length
        # Indexes of a launch's tokens in the flattened history, less the launch's number.
        self._history_indexes = slots * rows.history.shape[1] + lengths - (1 + launch.number)
        self._step = np.zeros(rows.max_rows, np.int32)  # [max_rows] tokens of each row in a launch
        self._step[slots] = 1
        self._may_hold = slots[rows.may_hold[slots]]  # [m] rows that S may hold
        self._one_each = np.ones(self._may_hold.size, np.int64)  # [m]
        stops = rows.stop_ids[slots, : rows.stop_width]
        self._stops = stops if np.count_nonzero(stops >= 0) else None  # [n, stop ids]

    def commit(self, launch: Launch, cells: NDArray[np.int64]) -> Commit | None:
        """Commit a launch's cells, [n, 1 + K].

        Returns None, and changes nothing, if the commit needs `Commits._commit_rows`: the rows differ, a row ends or
        may end, a cell has more than this launch's number and a token, or there are drafts.
        """
        rows, number = self._rows, launch.number
        if launch.sample_slots is not self._slots or self._ended != rows.ended or number > self._last:
            return None
        tokens = only_tokens(cells, number)
        if tokens is None:
            return None
        if self._stops is not None and np.count_nonzero(self._stops == tokens[:, None]):
            return None
        rows.commit_one_each(self._history_indexes + number, tokens, self._step)
        if self._may_hold.size:  # all of them brought a token
            rows.correct_bounds(self._may_hold, number, self._one_each)
        same = self._columns
        return Commit(number, same.cells, same.slots, tokens, same.owners, same.handles, self._firsts, ())


class TokenTimes:
    """A column by row slot, in seconds; NaN where a request has had no token.

    Rows that decode together get their tokens together, launch after launch. So the rows of the last `advance` are one
    group with one time, and the column is written when the group changes.
    """

    def __init__(self, max_rows: int) -> None:
        self._column = np.full(max_rows, np.nan)  # times of rows outside the group
        self._group = b""  # int32 row slots as bytes, which compare faster
        self._group_s = math.nan
        self._members = frozenset[int]()  # the group as a set

    def advance(self, slots: NDArray[np.int32], now: float) -> float | NDArray[np.float64]:
        """Record a token of these rows, [n], at `now`. Returns the time since the previous token of each, [n], or one
        number if the rows are the previous call's."""
        group = slots.tobytes()
        if group == self._group:
            since, self._group_s = now - self._group_s, now
            return since
        self._settle()
        since_each: NDArray[np.float64] = now - self._column.take(slots)
        self._group, self._group_s = group, now
        self._members = frozenset(slots.tolist())
        return since_each

    def begin(self, slot: int, last_s: float) -> None:
        """Give the row to a request. last_s: time of the request's last token; NaN without one."""
        if slot in self._members:  # the slot's previous request was in the group
            self._settle()
        self._column[slot] = last_s

    def last_s(self, slot: int) -> float:
        """Return the time of the row's last token."""
        self._settle()
        return float(self._column[slot])

    def _settle(self) -> None:
        """Write the group's time to the column."""
        self._column.put(np.frombuffer(self._group, np.int32), self._group_s)
        self._group, self._members = b"", frozenset()
