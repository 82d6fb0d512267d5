"""Rows that do nothing but decode: what is known in advance of all their next launches.

While no row begins, ends or changes its phase, each launch takes the same rows one token further. The row list, the
epochs, who crosses a block border with which launch, and which launch is the last that can hold them all, follow from
one look at the columns, and hold for every launch of the course. Rows that S may hold are planned as if it held none:
a commit that shows that it did ends the course.
"""

from __future__ import annotations

import sys
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.plan import LaunchPlan
from runahead.runtime.scheduler.rows import Rows

_LEAST_AND_STATE: Final = np.array([[0], [2]])  # `least_len` and `state_len` in `Rows.planned`


class Course:
    """What the launches after one have in common, as long as its rows decode on.

    plan: of the launch that the course begins after. It has every row that there is, and all of them are sampled from
    what it leaves. rows: as that plan has left them, for launches that bring one token; both bounds of each length are
    the same, but for rows that S may hold. until: the course goes on up to this launch at most.
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
        """Go on to launch `number`, the next one. True if it has the rows of the course and no others, unless somebody
        is admitted.

        The first of its launches brings the look along the columns, which all later ones rely on. The turn before, in
        which a row may have begun, has enough to do.
        """
        if number < self._first or self._changes != self._rows.changes:
            return False
        if number == self._first:
            self._look_ahead()
        return number <= self.last

    def _look_ahead(self) -> None:
        """What all launches of the course have in common, from one look at the columns."""
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
