"""Makes a run's requests from a seed: due times, prompts and answer lengths."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

_LEAST_SHARE: Final = 1 / 12  # shortest prompt or answer, relative to the median
_MOST_SHARE: Final = 5.0  # longest one


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal token counts. spread: sigma of the logarithm; 0: always the median."""

    median: int
    spread: float

    def draw(self, source: random.Random, most: int) -> int:
        """Draw 1 to `most` tokens."""
        drawn = source.lognormvariate(math.log(self.median), self.spread)
        bounded = min(max(drawn, self.median * _LEAST_SHARE), self.median * _MOST_SHARE)
        return min(max(1, round(bounded)), most)


@dataclass(frozen=True, slots=True)
class Planned:
    """A request. due_s: after the run's start. prompt: token ids. max_tokens: the answer's length, since ends are
    ignored.
    """

    due_s: float
    prompt: tuple[int, ...]
    max_tokens: int


def planned(
    rate: float, count: int, prompts: Lengths, answers: Lengths, *, vocab: int, context: int, seed: int
) -> list[Planned]:
    """Plan Poisson arrivals. A seed gives the same requests at any rate; the rate only stretches their times.

    rate: requests a second; 0: all are due at once. vocab: bound of prompt ids. context: bound of a prompt and its
    answer together.
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
