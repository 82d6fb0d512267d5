"""Rows that do nothing but decode: what is known in advance of all their next launches.

While no row begins, ends or changes its phase, each launch takes the same rows one token further. The row list, the
epochs, who crosses a block border with which launch, and which launch is the last that can hold them all, follow from
one look at the columns, and hold for every launch of the course.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.plan import LaunchPlan
from runahead.runtime.scheduler.rows import Rows


class Course:
    """What the launches after one have in common, as long as its rows decode on.

    plan: of the launch that the course begins after. It has every row that there is, and all of them are sampled from
    what it leaves. rows: as that plan has left them, both bounds of each length the same, for launches that bring one
    token. until: the course goes on up to this launch at most.
    """

    __slots__ = (
        "_block_size",
        "_changes",
        "_crossing",
        "_first",
        "_places",
        "_rows",
        "_slots",
        "_until",
        "last",
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
        lengths, ends = rows.least_len[slots], rows.max_len[slots]
        self.needs_full = bool(np.count_nonzero(rows.needs_full[slots]))
        self.step = np.zeros(rows.max_rows, np.int64)  # [max_rows] what a launch adds to each column of `Rows.planned`
        self.step[slots] = 1
        # The last token of a row is never forwarded: no launch holds a row that is as long as it may become.
        self.last = min(self._until, self.plan.number + int(np.minimum.reduce(ends - 1 - lengths)))
        # A row crosses a border with every block_size-th launch: which ones, by their numbers' place in a block. [n]
        self._places = (rows.num_blocks[slots] * size - lengths + self._first) % size
        self._slots = slots
        self._crossing: list[NDArray[np.int64] | None] = [None] * size

    def crossing(self, number: int) -> NDArray[np.int64]:
        """Slots of the rows that cross a border with this launch, ascending."""
        place = number % len(self._crossing)
        found = self._crossing[place]
        if found is None:
            found = self._crossing[place] = self._slots[self._places == place]
        return found
