"""The requests of a run, from a seed: when each one is due, its prompt, and how many tokens it asks for."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

_LEAST_SHARE: Final = 1 / 12  # of the median: no prompt or answer is shorter
_MOST_SHARE: Final = 5.0  # of the median: and none is longer


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, lognormal. spread: sigma of the logarithm; 0: all have the median."""

    median: int
    spread: float

    def draw(self, source: random.Random, most: int) -> int:
        """1 to `most` tokens."""
        drawn = source.lognormvariate(math.log(self.median), self.spread)
        bounded = min(max(drawn, self.median * _LEAST_SHARE), self.median * _MOST_SHARE)
        return min(max(1, round(bounded)), most)


@dataclass(frozen=True, slots=True)
class Planned:
    """due_s: after the run's begin. prompt: token ids. max_tokens: which the answer has, since ends are ignored."""

    due_s: float
    prompt: tuple[int, ...]
    max_tokens: int


def planned(
    rate: float, count: int, prompts: Lengths, answers: Lengths, *, vocab: int, context: int, seed: int
) -> list[Planned]:
    """Poisson arrivals; the same requests for the same seed, whatever the rate, which stretches their times alone.

    rate: requests a second; 0: all are due at once. vocab: ids of prompts are below it. context: tokens that a prompt
    and its answer may have together.
    """
    source = random.Random(seed)
    due, found = 0.0, list[Planned]()
    for _ in range(count):
        apart = source.expovariate(1.0)
        due += apart / rate if rate else 0.0
        answer = answers.draw(source, max(1, context // 2))
        length = prompts.draw(source, context - answer)
        found.append(Planned(due, tuple(source.randrange(vocab) for _ in range(length)), answer))
    return found
