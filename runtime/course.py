"""Rows that do nothing but decode: what is known in advance of all their next launches. Pure.

While no row begins, ends or changes its phase, each launch takes the same rows one token further. The row list, the
epochs, who crosses a block border with which launch, and which launch is the last that can hold them all, follow from
one look at the columns, and hold for every launch of the course.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.plan import LaunchPlan
from runtime.rows import Rows


class Course:
    """What the launches after one have in common, as long as its rows decode on.

    plan: of the launch that the course begins after. It has the rows of the launch before it, all of them sampled, and
    every row that may decode. rows: as that plan has left them, for launches that bring one token.
    """

    __slots__ = ("_changes", "_crossing", "_first", "_places", "_slots", "last", "needs_full", "plan", "step")

    def __init__(self, plan: LaunchPlan, rows: Rows, block_size: int) -> None:
        slots = plan.rows.astype(np.int64)
        lengths, ends = rows.least_len[slots], rows.max_len[slots]
        self.plan = plan
        plan.rows.flags.writeable = plan.samples.flags.writeable = False  # launches share them from here on
        self.needs_full = bool(np.count_nonzero(rows.needs_full[slots]))
        self.step = np.zeros(rows.max_rows, np.int64)  # [max_rows] what a launch adds to each column of `Rows.planned`
        self.step[slots] = 1
        # The last token of a row is never forwarded: no launch holds a row that is as long as it may become.
        self.last = plan.number + int((ends - 1 - lengths).min())
        self._first = plan.number + 1
        self._changes = rows.changes
        # A row crosses a border with every block_size-th launch: which ones, by their numbers' place in a block. [n]
        self._places = (rows.num_blocks[slots] * block_size - lengths + plan.number + 1) % block_size
        self._slots = slots
        self._crossing: list[NDArray[np.int64] | None] = [None] * block_size

    def holds(self, number: int, rows: Rows) -> bool:
        """Launch `number`, the next one, has the rows of the course and no others, where nobody is admitted."""
        return self._first <= number <= self.last and self._changes == rows.changes

    def crossing(self, number: int) -> NDArray[np.int64]:
        """Slots of the rows that cross a border with this launch, ascending."""
        place = number % len(self._crossing)
        found = self._crossing[place]
        if found is None:
            found = self._crossing[place] = self._slots[self._places == place]
        return found
