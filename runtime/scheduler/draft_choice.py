"""Choose the number of drafts K that a launch verifies of each decoding row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """Measured times and prices of drafts.

    query_tokens, step_ms: time of a launch by its query tokens on a GPU, ascending; interpolated between two entries,
    constant beyond the last. The other times are for the CPU, in launches without drafts. base: a launch with drafts.
    position: a drafter's step for one draft position, relative to its expected time. token: one query token.

    least_price, row_price, most_price: the price of an n-gram draft, in tokens that a launch without it would bring: a
    minimum, an increment for each row, and a maximum.
    """

    query_tokens: tuple[int, ...]
    step_ms: tuple[float, ...]
    base: float
    position: float
    token: float
    least_price: float
    row_price: float
    most_price: float


MOST: Final = 7
FORMS: Final = (1, 3, MOST)  # the choices of K beside 0
STRETCH: Final = 8  # launches with the same acceptance rates
PROBE_EVERY: Final = 48  # stretches
KNOWN_AFTER: Final = 5  # launches: after so many a launch is committed at every depth
FADING: Final = 0.97  # decay of the counts with each launch
_TRIED: Final = 32  # most query tokens of a probe of `ChoiceByForms`


class ChoiceByAcceptance:
    """Choose K from recent acceptance rates by draft position and from the number of decoding rows.

    A right draft brings a token; drafts make a launch longer. So positions are drafted as long as their acceptance rate
    exceeds a draft's price in tokens.

    The rates change only with every STRETCH-th launch and cover launches up to the fifth before it. One stretch in
    `probe_every` probes, so that drafts that pay again are noticed.
    """

    most: Final = MOST
    probe_every: int = PROBE_EVERY

    def __init__(self, costs: DraftCosts) -> None:
        self._costs = costs
        # By draft position, with decay. At first the acceptance rate is one half.
        self._tested = np.full(MOST, 8.0)
        self._right = np.full(MOST, 4.0)
        self._waiting: deque[tuple[int, NDArray[np.int64], NDArray[np.int64]]] = deque()
        self._stretch = -1
        self._rates = self._right / self._tested  # in this stretch

    def drafts(self, number: int, rows: int) -> int:
        self._enter(number // STRETCH)
        if number // STRETCH % self.probe_every == 0:
            return self._tried(rows)
        return self._chosen(rows, self._rates)

    def _tried(self, rows: int) -> int:
        """Return K of a probing stretch. rows: as in `drafts`."""
        return MOST

    def _chosen(self, rows: int, rates: NDArray[np.float64]) -> int:
        """Return K for these acceptance rates, [MOST]. rows: as in `drafts`."""
        found, price = 0, self._price(rows)
        for first, end in pairwise((0, *FORMS)):
            if rates[first:end].mean() <= price:
                break
            found = end
        return found

    def _price(self, rows: int) -> float:
        """Return a draft's price, in tokens that a launch without it would bring: the added time per draft.

        A single row has a lower price: its text may begin to repeat at any time, and a high price would delay the
        discovery.
        """
        return min(self._costs.most_price, self._costs.least_price + self._costs.row_price * rows)

    def stays_until(self, number: int) -> int:
        stretch = number // STRETCH
        if not self._waiting:  # the rates stay the same until the next probe
            stretch += self.probe_every - 1 - stretch % self.probe_every
        return stretch * STRETCH + STRETCH - 1

    def learn(self, number: int, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        index = np.arange(MOST)
        tested = np.count_nonzero(drafted[:, None] > index, axis=0)
        self._waiting.append((number, tested, np.count_nonzero(accepted[:, None] > index, axis=0)))

    def _enter(self, stretch: int) -> None:
        """Begin a stretch and update the rates from the launches that may be known by now."""
        if stretch == self._stretch:
            return
        self._stretch = stretch
        while self._waiting and self._waiting[0][0] <= stretch * STRETCH - KNOWN_AFTER:
            _, tested, right = self._waiting.popleft()
            fading = np.where(tested > 0, FADING, 1.0)
            self._tested = self._tested * fading + tested
            self._right = self._right * fading + right
        self._rates = self._right / self._tested


class ChoiceByTime(ChoiceByAcceptance, ABC):
    """Choose the K with the most tokens per time, if it brings 5 % more than K = 0.

    step: time of a drafter's step for all rows, as a fraction of a launch without drafts; 0: negligible.
    """

    def __init__(self, costs: DraftCosts, step: float = 0.0) -> None:
        super().__init__(costs)
        self._step = step

    @abstractmethod
    def _takes(self, rows: int, drafts: int) -> float:
        """Return a launch's time with K = `drafts`, in any unit that is the same for all K."""

    def _chosen(self, rows: int, rates: NDArray[np.float64]) -> int:
        brought = 1 + np.concatenate([[0], np.cumsum(rates)])
        speeds = {drafts: float(brought[drafts]) / self._takes(rows, drafts) for drafts in (0, *FORMS)}
        best = max(speeds, key=lambda drafts: speeds[drafts])
        return best if speeds[best] > 1.05 * speeds[0] else 0


class ChoiceOfAHead(ChoiceByTime):
    """For a drafter that takes a step for each place of the run, and has a guess for every row.

    What is tried at most doubles a launch, and is tried more rarely, so that it costs 1 % where it pays nothing.
    """

    probe_every = 2 * PROBE_EVERY

    def _takes(self, rows: int, drafts: int) -> float:
        """In launches without drafts."""
        if not drafts:
            return 1.0
        return self._costs.base + drafts * (self._costs.position * self._step + self._costs.token * rows)

    def _tried(self, rows: int) -> int:
        return max((drafts for drafts in FORMS if self._takes(rows, drafts) <= 2), default=1)


class ChoiceByForms(ChoiceByTime):
    """Choose K for launches in which each row costs K more query tokens, whether drafts were proposed or not.

    The time of a launch depends on its query tokens alone: see `DraftCosts`. Probes have at most 32 query tokens, or
    one draft for each row. A drafter with steps is probed more rarely.
    """

    def __init__(self, costs: DraftCosts, step: float = 0.0) -> None:
        super().__init__(costs, step)
        self.probe_every = PROBE_EVERY if not step else ChoiceOfAHead.probe_every

    def _tried(self, rows: int) -> int:
        return next((drafts for drafts in (MOST, 3) if rows * (1 + drafts) <= _TRIED), 1)

    def _takes(self, rows: int, drafts: int) -> float:
        """In milliseconds."""
        plain, takes = np.interp([rows, rows * (1 + drafts)], self._costs.query_tokens, self._costs.step_ms)
        return float(takes + drafts * self._step * plain)
