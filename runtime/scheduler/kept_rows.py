"""The short way to commit a launch whose rows are those of the launch before.

While the launches' rows stay the same and no row has ended, most of a commit is the same each time: whose tokens they
are, where in the history they go, that none is a first one, and with which launch a row reaches its greatest length.
Only the cells are left to look at. A row that begins changes none of this: the launch that admits it still samples the
rows of the launch before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.scheduler.ledger import Launch
from runahead.runtime.scheduler.outcomes import Commit
from runahead.runtime.scheduler.result_cells import only_tokens
from runahead.runtime.scheduler.rows import Rows


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
