"""Counts of what happened to requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

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
