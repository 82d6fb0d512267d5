"""What consecutive launches of the same rows have in common, planned and committed from one look at the columns.

While no row begins, ends or changes its phase, each launch takes the same rows one token further. The row list, the
epochs, who crosses a block border with which launch, and which launch is the last that can hold them all, follow from
one look at the columns, and hold for every launch of steady decode. Rows that S may hold are planned as if it held
none: a commit that shows that it did ends steady decode.

While the launches' rows stay the same and no row has ended, most of a commit is the same each time, too: whose tokens
they are, where in the history they go, that none is a first one, and with which launch a row reaches its greatest
length. Only the cells are left to look at. A row that begins changes none of this: the launch that admits it still
samples the rows of the launch before.
"""

from __future__ import annotations

import sys
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.plan import LaunchPlan
from runahead.runtime.scheduler.ledger import Launch
from runahead.runtime.scheduler.outcomes import Commit
from runahead.runtime.scheduler.result_cells import only_tokens
from runahead.runtime.scheduler.rows import Rows

_LEAST_AND_STATE: Final = np.array([[0], [2]])  # `least_len` and `state_len` in `Rows.planned`


class SteadyDecode:
    """What the launches after one have in common, as long as its rows decode on.

    plan: of the launch before the first. It has every row that there is, and all of them are sampled from what it
    leaves. rows: as that plan has left them, for launches that bring one token; both bounds of each length are
    the same, but for rows that S may hold. until: steady decode goes on up to this launch at most.
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
        """Go on to launch `number`, the next one. True if it has the same rows and no others, unless a row is
        admitted.

        The first of its launches brings the look along the columns, which all later ones rely on. The turn before, in
        which a row may have begun, has enough to do.
        """
        if number < self._first or self._changes != self._rows.changes:
            return False
        if number == self._first:
            self._look_ahead()
        return number <= self.last

    def _look_ahead(self) -> None:
        """What all launches of steady decode have in common, from one look at the columns."""
        self.plan.rows.setflags(write=False)  # launches share them from here on
        self.plan.samples.setflags(write=False)
        rows, size, slots = self._rows, self._block_size, self.plan.rows.astype(np.int64)
        lengths, ends = rows.most_len[slots], rows.max_len[slots]
        self.needs_full = bool(np.count_nonzero(rows.needs_full[slots]))
        self.masked = bool(np.count_nonzero(rows.may_hold[slots]))
        self.step = np.zeros_like(rows.planned)  # what a launch adds
        self.step[:, slots] = 1
        # The least that a row that S may hold can have grows when its token is committed.
        self.step[_LEAST_AND_STATE, slots[rows.may_hold[slots]]] = 0
        # The last token of a row is never forwarded: no launch holds a row that is as long as it may become.
        self.last = min(self._until, self.plan.number + int(np.minimum.reduce(ends - 1 - lengths)))
        # A row crosses a border with this launch, and with every block_size-th after it. [n]
        self._crosses_at = rows.num_blocks[slots] * size - lengths + self._first
        # Up to this launch some row has room for more than a block: it was held, or had drafts, at a border.
        room_until = int(np.maximum.reduce(self._crosses_at))
        self._with_room = room_until if room_until >= self._first + size else 0
        self._slots = slots
        self._crossing: list[NDArray[np.int64] | None] = [None] * size

    def crossing(self, number: int) -> NDArray[np.int64]:
        """Slots of the rows that cross a border with this launch, ascending."""
        size = len(self._crossing)
        if number < self._with_room:
            since = number - self._crosses_at
            crossing: NDArray[np.int64] = self._slots[(since >= 0) & (since % size == 0)]
            return crossing
        place = number % size
        found = self._crossing[place]
        if found is None:
            found = self._crossing[place] = self._slots[self._crosses_at % size == place]
        return found


class KeptRows:
    """What the commits after one have in common.

    launch, commit: the one before them, without drafts to look at. It kept a token of each of its rows, ended none,
    and its F has the same rows: its `row_slots` are its `sample_slots`.
    """

    __slots__ = (
        "_columns",
        "_ended",
        "_firsts",
        "_last",
        "_may_hold",
        "_one_each",
        "_places",
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
        self._last = launch.number + shortest - 1  # after it a row ends by its length
        # Of a launch's tokens in the history, one row behind the other, less the launch's number.
        self._places = slots * rows.history.shape[1] + lengths - (1 + launch.number)
        self._step = np.zeros(rows.max_rows, np.int32)  # [max_rows] tokens that a launch brings of each row
        self._step[slots] = 1
        self._may_hold = slots[rows.may_hold[slots]]  # [m] those that S may hold
        self._one_each = np.ones(self._may_hold.size, np.int64)  # [m]
        stops = rows.stop_ids[slots, : rows.stop_width]
        self._stops = stops if np.count_nonzero(stops >= 0) else None  # [n, stop ids]

    def commit(self, launch: Launch, cells: NDArray[np.int64]) -> Commit | None:
        """Write a launch's cells, [n, 1 + K], into the host's truth.

        None, and nothing is changed, where that has to go the long way: there are other rows, a row ends or may end, or
        a cell holds anything but this launch's number and a token, or there are drafts to look at.
        """
        rows, number = self._rows, launch.number
        if launch.sample_slots is not self._slots or self._ended != rows.ended or number > self._last:
            return None
        tokens = only_tokens(cells, number)
        if tokens is None:
            return None
        if self._stops is not None and np.count_nonzero(self._stops == tokens[:, None]):
            return None
        rows.commit_one_each(self._places + number, tokens, self._step)
        if self._may_hold.size:  # it has held none
            rows.correct_bounds(self._may_hold, number, self._one_each)
        same = self._columns
        return Commit(number, same.cells, same.slots, tokens, same.owners, same.handles, self._firsts, ())
