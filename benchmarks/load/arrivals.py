"""When calls are made that wait for no other: arrivals drawn beforehand from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """A call of an open-loop load. at_s: seconds after the start. source: its caller's number. draw: from 0 to 1,
    chooses the case."""

    at_s: float
    source: int
    draw: float


def poisson(seed: int, sources: int, per_s: float, seconds: float) -> list[Arrival]:
    """The calls of so many sources within so many seconds, in order. Each source is a Poisson process; together they
    make `per_s` calls a second on average."""
    found = []
    for source in range(sources):
        draw = random.Random(f"{seed} {source}")
        at_s = draw.expovariate(per_s / sources)
        while at_s < seconds:
            found.append(Arrival(at_s, source, draw.random()))
            at_s += draw.expovariate(per_s / sources)
    return sorted(found, key=lambda arrival: arrival.at_s)
