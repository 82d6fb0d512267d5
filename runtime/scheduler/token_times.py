"""When the request of each row had its last token. The times are the caller's."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


class TokenTimes:
    """A column by row slot, in seconds; NaN where a request has had no token.

    Rows that decode together have their tokens together, launch after launch. So the rows of the last call of `advance`
    are kept as one group with one time, and the column is written when the group changes.
    """

    def __init__(self, max_rows: int) -> None:
        self._column = np.full(max_rows, np.nan)  # of rows that are not in the group
        self._group = b""  # int32 row slots, as bytes: two groups are compared faster so
        self._group_s = math.nan
        self._members = frozenset[int]()  # the group once more, to look for one row in

    def advance(self, slots: NDArray[np.int32], now: float) -> float | NDArray[np.float64]:
        """These rows, [n], have a token now. Returns how long ago each had the one before, [n]; one number for all of
        them where they are the rows of the call before."""
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
        """A request gets this row. last_s: of its last token, NaN without one."""
        if slot in self._members:  # as the row of another request, before
            self._settle()
        self._column[slot] = last_s

    def last_s(self, slot: int) -> float:
        """When the row had its last token."""
        self._settle()
        return float(self._column[slot])

    def _settle(self) -> None:
        """The group's time into the column."""
        self._column.put(np.frombuffer(self._group, np.int32), self._group_s)
        self._group, self._members = b"", frozenset()
