"""Counts of what happened to requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

NO_EVENTS: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(slots=True)
class Tally:
    """Counts since the start.

    finished: requests by the name of their reason. aborted: requests that a client aborted or cancelled, by phase.
    events: lifecycle events since the last plan, by kind.
    """

    counters: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    aborted: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)

    def event(self, kind: str, times: int = 1) -> None:
        if times:
            self.events[kind] += times

    def hand_over_events(self) -> Mapping[str, int]:
        """Return the events since the last plan, and begin to count anew."""
        events, self.events = self.events, Counter()
        return events


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
