"""How many drafts a launch verifies of each row that decodes."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """query_tokens, step_ms: how long a launch of so many query tokens takes on a GPU, ascending; between two it is
    interpolated, and beyond the last it takes as long as that. The other times are in launches without drafts, where
    each row has as many places as it has drafts (the CPU's). runs: of a launch with any drafts. place: of a drafter's
    step for a place of the run, over the step that its weights let expect. token: of a query token.

    least_price, row_price, most_price: what a draft costs that is looked up, in tokens that the launch would bring
    without it: the first, and so much for each row, at most the last.
    """

    query_tokens: tuple[int, ...]
    step_ms: tuple[float, ...]
    runs: float
    place: float
    token: float
    least_price: float
    row_price: float
    most_price: float


MOST: Final = 7
FORMS: Final = (1, 3, MOST)  # numbers of drafts among which is chosen, beside none
STRETCH: Final = 8  # launches in which the same is known
PROBE_EVERY: Final = 48  # stretches
KNOWN_AFTER: Final = 5  # launches: by then a launch is committed at every depth
FADING: Final = 0.97  # of what is known, with each launch
_TRIED: Final = 32  # query tokens of a launch in which drafts are tried whose rows all cost as many


class DraftChoice(Protocol):
    """Asked for each launch that is planned anew; told what launches have brought."""

    @property
    def most(self) -> int:
        """No launch verifies more drafts of a row."""

    def drafts(self, number: int, rows: int) -> int:
        """K of launch `number`, in which so many rows may decode."""

    def stays_until(self, number: int) -> int:
        """The last launch that has the same K as launch `number`, which was planned just now, as long as it has the
        same rows."""

    def learn(self, number: int, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Launch `number`, the next that looked at drafts, is committed. drafted, accepted: of each row how many drafts
        it has looked at, and how many of them were right. [n], [n]"""


class FixedChoice:
    """The same for every launch."""

    def __init__(self, count: int) -> None:
        self.most: Final = count

    def drafts(self, number: int, rows: int) -> int:
        return self.most

    def stays_until(self, number: int) -> int:
        return sys.maxsize

    def learn(self, number: int, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        pass


class ChoiceByAcceptance:
    """As many as pay, by how many drafts of each place in the run were right of late, and by how many rows decode.

    A launch brings a token where a draft is right. It is longer for having drafts at all, and for each of them. So
    places of a run are drafted as long as the share of right drafts there is above what one costs in tokens.

    What is known changes with every STRETCH-th launch alone, and stems from launches up to the fifth before. A stretch
    out of every `probe_every` tries, so that what pays again is found.
    """

    most: Final = MOST
    probe_every: int = PROBE_EVERY

    def __init__(self, costs: DraftCosts) -> None:
        self._costs = costs
        # By place in the run, fading. At first, half are right.
        self._looked_at = np.full(MOST, 8.0)
        self._right = np.full(MOST, 4.0)
        self._waiting: deque[tuple[int, NDArray[np.int64], NDArray[np.int64]]] = deque()
        self._stretch = -1
        self._shares = self._right / self._looked_at  # in this stretch

    def drafts(self, number: int, rows: int) -> int:
        self._enter(number // STRETCH)
        if number // STRETCH % self.probe_every == 0:
            return self._tried(rows)
        return self._chosen(rows, self._shares)

    def _tried(self, rows: int) -> int:
        """K where something is tried. rows: as `drafts`'."""
        return MOST

    def _chosen(self, rows: int, shares: NDArray[np.float64]) -> int:
        """K by the shares of right drafts, [MOST]. rows: as `drafts`'."""
        found, price = 0, self._price(rows)
        for first, end in pairwise((0, *FORMS)):
            if shares[first:end].mean() <= price:
                break
            found = end
        return found

    def _price(self, rows: int) -> float:
        """What a draft costs, in tokens that the launch would bring without it: how much longer it is, for each draft.
        One row is drafted for at less: what it says may begin to repeat itself at any time, and that would be found
        late."""
        return min(self._costs.most_price, self._costs.least_price + self._costs.row_price * rows)

    def stays_until(self, number: int) -> int:
        stretch = number // STRETCH
        if not self._waiting:  # nothing more will be known until drafts are tried again
            stretch += self.probe_every - 1 - stretch % self.probe_every
        return stretch * STRETCH + STRETCH - 1

    def learn(self, number: int, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        place = np.arange(MOST)
        looked_at = np.count_nonzero(drafted[:, None] > place, axis=0)
        self._waiting.append((number, looked_at, np.count_nonzero(accepted[:, None] > place, axis=0)))

    def _enter(self, stretch: int) -> None:
        """What may be known in this stretch is counted in."""
        if stretch == self._stretch:
            return
        self._stretch = stretch
        while self._waiting and self._waiting[0][0] <= stretch * STRETCH - KNOWN_AFTER:
            _, looked_at, right = self._waiting.popleft()
            fading = np.where(looked_at > 0, FADING, 1.0)
            self._looked_at = self._looked_at * fading + looked_at
            self._right = self._right * fading + right
        self._shares = self._right / self._looked_at


class ChoiceByTime(ChoiceByAcceptance, ABC):
    """The K that brings most tokens in a launch's time, if it brings 5 % more than none.

    step: what the drafter takes for a place of the run, for all rows together, as a share of a launch without drafts;
    0: next to nothing.
    """

    def __init__(self, costs: DraftCosts, step: float = 0.0) -> None:
        super().__init__(costs)
        self._step = step

    @abstractmethod
    def _takes(self, rows: int, drafts: int) -> float:
        """How long a launch is with so many drafts of each row, in a unit that is the same for all of them."""

    def _chosen(self, rows: int, shares: NDArray[np.float64]) -> int:
        brought = 1 + np.concatenate([[0], np.cumsum(shares)])
        rates = {drafts: float(brought[drafts]) / self._takes(rows, drafts) for drafts in (0, *FORMS)}
        best = max(rates, key=lambda drafts: rates[drafts])
        return best if rates[best] > 1.05 * rates[0] else 0


class ChoiceOfAHead(ChoiceByTime):
    """For a drafter that takes a step for each place of the run, and has a guess for every row.

    What is tried at most doubles a launch, and is tried more rarely, so that it costs 1 % where it pays nothing.
    """

    probe_every = 2 * PROBE_EVERY

    def _takes(self, rows: int, drafts: int) -> float:
        """In launches without drafts."""
        if not drafts:
            return 1.0
        return self._costs.runs + drafts * (self._costs.place * self._step + self._costs.token * rows)

    def _tried(self, rows: int) -> int:
        return max((drafts for drafts in FORMS if self._takes(rows, drafts) <= 2), default=1)


class ChoiceByForms(ChoiceByTime):
    """For launches in which each row costs K query tokens more, whatever was proposed for it: every place counts as
    looked at.

    How long a launch takes depends on its query tokens: as long as a plain step of as many rows (`DraftCosts`). No more
    than 32 query tokens are tried, or one draft a row. A drafter that takes steps is tried more rarely.
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
