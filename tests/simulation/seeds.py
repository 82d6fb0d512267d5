"""One seed, as a process of `make sim` runs it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.simulation.compare import check_script
from tests.simulation.generate import make_script
from tests.simulation.life import Broken
from tests.simulation.script import Mode


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of one seed. failure: what went wrong, or empty."""

    seed: int
    counts: Counter[str]
    longest_stall: int
    failure: str = ""


def run_seed(seed: int, mode: Mode | None) -> Ran:
    """A seed at all its depths."""
    try:
        witnesses = check_script(make_script(seed, mode))
    except Broken as broken:
        return Ran(seed, Counter(), 0, str(broken))
    counts = sum((witness.counts for witness in witnesses), Counter[str]())
    return Ran(seed, counts, max(witness.longest_stall for witness in witnesses))
