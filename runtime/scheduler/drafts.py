"""How many tokens a launch brings of a row, and what follows from it. Nothing else in the scheduler knows of drafts.

Without drafts a launch brings one token of each row that it samples. With K drafts F has 1 + K query tokens of a row
that decodes: the newest token, and K that are guessed. The S after it keeps 1 to 1 + K tokens: those drafts that it
would have sampled itself, and the token that it samples behind them. For K = 2, after a prompt of 5 tokens:

    launch                             10            11            12
    its F holds                        p p p p p     t d d         t d d
    its S brings                                     1             1 to 3
    the row's length in its F, least   5             6             7
                             and most  5             6             9
    tokens that its blocks must hold   5             8             11

What S has kept is known when its launch is committed: then the bounds come together again.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.plan import LaunchPlan
from runahead.runtime.scheduler.course import Course
from runahead.runtime.scheduler.kept_rows import KeptRows
from runahead.runtime.scheduler.ledger import Launch, Ledger
from runahead.runtime.scheduler.outcomes import Commit, Deferred
from runahead.runtime.scheduler.result_cells import SampledTokens
from runahead.runtime.scheduler.rows import Rows


class DraftPolicy(Protocol):
    """What the scheduler and its commits ask."""

    @property
    def tokens(self) -> int:
        """Query tokens of a row that decodes, and result cells of a row that is sampled: 1 + K."""

    def held(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that the blocks of these rows must hold if they are in the next launch. [n]"""

    def most(self, slots: NDArray[np.int64], held: NDArray[np.int64]) -> NDArray[np.int64]:
        """The most tokens that these rows can have in the F of the next launch. held: as it was said of them. [n]"""

    def tighten(self, launch: Launch, slots: NDArray[np.intp], found: SampledTokens) -> None:
        """A launch is committed: the bounds of its rows' lengths follow from what it brought. slots: [n] of the rows
        that `found` was read from, whose `committed_len` is still as before."""

    def course(self, plan: LaunchPlan, block_size: int) -> Course | None:
        """What the launches after this one have in common, if its rows decode on. None: they have to be looked at."""

    def kept(self, launch: Launch, commit: Commit) -> KeptRows | None:
        """What the commits after this one have in common, if its rows stay. None: they have to be looked at."""


class NoDrafts:
    """One token a launch: both bounds of a row's length are the same."""

    tokens: Final = 1

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def held(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._rows.most_len[slots] + 1

    def most(self, slots: NDArray[np.int64], held: NDArray[np.int64]) -> NDArray[np.int64]:
        return held

    def tighten(self, launch: Launch, slots: NDArray[np.intp], found: SampledTokens) -> None:
        pass

    def course(self, plan: LaunchPlan, block_size: int) -> Course | None:
        return Course(plan, self._rows, block_size)

    def kept(self, launch: Launch, commit: Commit) -> KeptRows | None:
        return KeptRows(launch, commit, self._rows)


class Drafts:
    """1 to 1 + count tokens a launch, count > 0. The first token after a prompt comes alone: nothing was drafted yet.

    No two launches are alike, since each may bring another number of tokens.
    """

    def __init__(self, count: int, rows: Rows, ledger: Ledger[Deferred]) -> None:
        self.tokens = 1 + count
        self._count = count
        self._rows = rows
        self._ledger = ledger

    def held(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """With the drafts that the next F verifies, but for what lies beyond the row's end: nobody writes that."""
        return np.minimum(self._most(slots) + self._count, self._rows.max_len[slots] - 1)

    def most(self, slots: NDArray[np.int64], held: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._most(slots)

    def _most(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """All drafts may be kept of rows whose last F held some that no committed S has verified. [n]"""
        rows = self._rows
        had_drafts = rows.least_len[slots] > rows.known_len[slots]
        is_open = np.logical_and(had_drafts, rows.last_launch[slots] >= self._ledger.committed)
        most: NDArray[np.int64] = rows.most_len[slots] + 1 + self._count * is_open
        return most

    def tighten(self, launch: Launch, slots: NDArray[np.intp], found: SampledTokens) -> None:
        """1 or `tokens` were allowed for; a row that is in no plan from this launch on was allowed for none yet: the
        next plan will allow for one."""
        rows, brought = self._rows, np.bincount(found.row, minlength=slots.size)  # type: ignore[arg-type]
        allowed = 1 + self._count * (rows.committed_len[slots] > rows.known_len[slots])
        counted = np.where(rows.last_launch[slots] >= launch.number, allowed, 1)
        rows.correct_bounds(slots, brought - 1, brought - counted)

    def course(self, plan: LaunchPlan, block_size: int) -> Course | None:
        return None

    def kept(self, launch: Launch, commit: Commit) -> KeptRows | None:
        return None


def draft_policy(count: int, rows: Rows, ledger: Ledger[Deferred]) -> DraftPolicy:
    """count: K, the drafts of a launch and row."""
    return Drafts(count, rows, ledger) if count else NoDrafts(rows)
