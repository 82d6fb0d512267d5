"""Counts of what happened to requests. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """What has happened since the start.

    finished: requests by the name of their reason. aborted: requests ended from outside, by phase. events: lifecycle
    events since the last launch, by kind; whoever counts them takes them away.
    """

    counters: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    aborted: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)

    def event(self, kind: str, times: int = 1) -> None:
        if times:
            self.events[kind] += times
