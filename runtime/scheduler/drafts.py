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

Each launch has a K of its own, and may have two: rows with a grammar may have more drafts than the drafter makes, where
their grammars force what comes next. A row that may be held (`Rows.may_hold`) brings no token where what its next token
waits for is not there when S looks: its length may stay as it is. What S has kept is known when its launch is
committed: then the bounds come together again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import FORCED
from runahead.runtime.plan import LaunchPlan
from runahead.runtime.scheduler.draft_choice import DraftChoice
from runahead.runtime.scheduler.ledger import Launch, Ledger
from runahead.runtime.scheduler.outcomes import Commit, Deferred
from runahead.runtime.scheduler.plan_builder import PlanBuilder
from runahead.runtime.scheduler.result_cells import SampledTokens
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.scheduler.steady_decode import KeptRows, SteadyDecode


class DraftPolicy:
    """One token a launch, or none of a row that is held: where no row may be, both bounds of a length are the same.

    drafted, accepted: int64 [most K], drafts of committed launches by their place in the run: how many S has looked at,
    and how many of these were right. cells: result cells of a row, 1 + the most K of any launch.
    """

    def __init__(
        self, rows: Rows, ledger: Ledger[Deferred], most: int = 0, forced: int = 0, *, along_masks: bool = True
    ) -> None:
        """most: drafts of any row. forced: those of a row with a grammar, if that is more than there are guesses.
        along_masks: such a row may have guesses, too."""
        self.cells = 1 + most
        self._forced = forced  # in the launch that is planned now
        self.drafted, self.accepted = np.zeros((2, most), np.int64)
        self._rows = rows
        self._ledger = ledger
        self._along_masks = along_masks

    def choose(self, number: int, rows: int, chunks: int) -> int:
        """How many guesses launch `number` verifies of each row, which is planned now: K without a grammar. rows: that
        may decode in it. chunks: rows that may have a prompt chunk in it."""
        return 0

    def guesses(self, number: int, slots: NDArray[np.int64], chunks: int) -> int:
        """As `choose` says, of these rows: none where the drafter guesses for none of them. [n]"""
        chosen = self.choose(number, slots.size, chunks)
        if chosen and not self._along_masks and np.count_nonzero(self._rows.may_hold[slots]) == slots.size:
            return 0
        return chosen

    def beside_admissions(self, builder: PlanBuilder) -> None:
        """Rows may have begun with the launch: it has no drafts beside their chunks, where that can't be."""

    def most(self, slots: NDArray[np.int64], guesses: int) -> int:
        """K of a launch with so many guesses: the most drafts of any of these rows. [n]"""
        return max(guesses, self._forced) if self._forced > guesses and self._may_hold(slots) else guesses

    def held(self, slots: NDArray[np.int64], guesses: int) -> NDArray[np.int64]:
        """Tokens that the blocks of these rows must hold if they are in the next launch, with so many guesses: the
        drafts that its F verifies among them, and nothing beyond the row's end. [n]"""
        held: NDArray[np.int64] = np.minimum(
            self._most(slots) + self._of_each(slots, guesses), self._rows.max_len[slots] - 1
        )
        return held

    def plan(self, slots: NDArray[np.int64], guesses: int) -> None:
        """These rows decode in the next launch, with so many guesses. [n]"""
        self._rows.plan_decode(slots, self._least(slots), self._most(slots), self._of_each(slots, guesses))

    def _of_each(
        self, slots: NDArray[np.int64] | NDArray[np.intp], guesses: int, most: int | None = None
    ) -> NDArray[np.int64] | int:
        """Drafts of each of these rows, [n], in a launch with so many guesses. most: of a row with a grammar; None: as
        in a launch that is planned now."""
        forced = self._forced if most is None else most
        if forced <= guesses or not self._may_hold(slots):
            return guesses
        found: NDArray[np.int64] = np.where(self._rows.may_hold[slots], forced, guesses)
        return found

    def tighten(
        self, launch: Launch, slots: NDArray[np.intp], found: SampledTokens, drafted: NDArray[np.int8] | None
    ) -> None:
        """A launch is committed: the bounds of its rows' lengths follow from what it brought. slots: [n] of the rows
        that `found` was read from, whose `committed_len` is still as before. drafted: how many drafts S has looked at
        of each of them, [n]; None: the launch has none to look at."""
        if self._may_hold(slots):
            self._rows.correct_bounds(slots, launch.number, _brought(found, slots.size))

    def steady_decode(self, plan: LaunchPlan, block_size: int) -> SteadyDecode | None:
        """What the launches after this one have in common, if its rows decode on. None: they have to be looked at."""
        return SteadyDecode(plan, self._rows, block_size)

    def kept(self, launch: Launch, commit: Commit) -> KeptRows | None:
        """What the commits after this one have in common, if its rows stay. None: they have to be looked at."""
        return KeptRows(launch, commit, self._rows)

    def _may_hold(self, slots: NDArray[np.intp] | NDArray[np.int32]) -> bool:
        """One of these rows may be held. [n]"""
        return bool(np.count_nonzero(self._rows.may_hold[slots]))

    def _is_open(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows' last F has left logits that no committed S has looked at. [n]"""
        return self._rows.last_launch[slots] >= self._ledger.committed

    def _least(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The fewest tokens that these rows can have in the F of the next launch. [n]"""
        rows = self._rows
        least: NDArray[np.int64] = rows.least_len[slots] + 1
        return least - (rows.may_hold[slots] & self._is_open(slots)) if self._may_hold(slots) else least

    def _most(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The most tokens that these rows can have in the F of the next launch. [n]"""
        most: NDArray[np.int64] = self._rows.most_len[slots] + 1
        return most


class Drafts(DraftPolicy):
    """1 to 1 + K tokens a launch. The first token after a prompt comes alone: nothing was drafted yet.

    Launches may each bring another number of tokens. Where K stays 0 for a while, they have as much in common as
    without drafts, once all that came before is committed.
    """

    def __init__(
        self, choice: DraftChoice, rows: Rows, ledger: Ledger[Deferred], forced: int = 0, forced_rows: int = 0,
        *, along_masks: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(rows, ledger, max(choice.most, forced), forced, along_masks=along_masks)
        self._most_forced = forced
        self._forced_rows = forced_rows
        self._choice = choice

    def choose(self, number: int, rows: int, chunks: int) -> int:
        self._forced = self._most_forced if rows <= self._forced_rows else 0
        return self._choice.drafts(number, rows)

    def _most(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """All drafts of the last F may be kept, until the S that looks at them is committed."""
        rows = self._rows
        most: NDArray[np.int64] = rows.most_len[slots] + 1 + rows.drafts[slots] * self._is_open(slots)
        return most

    def tighten(
        self, launch: Launch, slots: NDArray[np.intp], found: SampledTokens, drafted: NDArray[np.int8] | None
    ) -> None:
        if drafted is None:
            super().tighten(launch, slots, found, drafted)
            return
        brought = _brought(found, slots.size)
        allowed = self._of_each(slots, launch.sample_guesses, launch.shape.sample_drafts)
        # Of a row whose first token this is F had a chunk, and no drafts.
        allowed = allowed * (self._rows.first_sample[slots] < launch.number)
        self._rows.correct_bounds(slots, launch.number, brought, allowed)
        guessed = (drafted & FORCED) == 0
        self._count(launch, slots, drafted.astype(np.int64) & ~FORCED, np.maximum(brought - 1, 0), guessed)

    def _count(
        self,
        launch: Launch,
        slots: NDArray[np.intp],
        drafted: NDArray[np.int64],
        accepted: NDArray[np.int64],
        guessed: NDArray[np.bool_],
    ) -> None:
        """drafted, accepted: of each of these rows. guessed: which of them have their drafts of the drafter: what
        grammars force says nothing about how well it guesses. [n], [n], [n]"""
        place = np.arange(self.drafted.size)
        self.drafted += np.count_nonzero(drafted[:, None] > place, axis=0)
        self.accepted += np.count_nonzero(accepted[:, None] > place, axis=0)
        self._rows.count_drafts(slots, drafted, accepted)
        self._choice.learn(launch.number, self._paid(launch, drafted)[guessed], accepted[guessed])

    def _paid(self, launch: Launch, drafted: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many drafts of each row the launch has cost, whether there were so many or not. drafted: [n]"""
        return drafted

    def steady_decode(self, plan: LaunchPlan, block_size: int) -> SteadyDecode | None:
        rows, slots = self._rows, plan.rows
        if plan.drafts or (plan.chunks and (self._choice.most or self._may_hold(slots))):
            return None  # K was chosen for the rows that decode: with chunks, more may in the next launch
        if np.count_nonzero((rows.most_len[slots] - rows.least_len[slots])[~rows.may_hold[slots]]):
            return None
        return SteadyDecode(plan, rows, block_size, self._choice.stays_until(plan.number))

    def kept(self, launch: Launch, commit: Commit) -> KeptRows | None:
        return None if launch.shape.sample_drafts else super().kept(launch, commit)


class DraftForms(Drafts):
    """Launches with drafts are forms of their own: of up to `most_rows` rows, which all decode. Each row has as many
    query tokens as the form, drafts or not."""

    def __init__(
        self, choice: DraftChoice, rows: Rows, ledger: Ledger[Deferred], most_rows: int, forced: int = 0,
        forced_rows: int = 0, *, along_masks: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(choice, rows, ledger, forced, forced_rows, along_masks=along_masks)
        self._most_rows = most_rows

    def choose(self, number: int, rows: int, chunks: int) -> int:
        if chunks or rows > self._most_rows:
            self._forced = 0
            return 0
        return super().choose(number, rows, chunks)

    def beside_admissions(self, builder: PlanBuilder) -> None:
        if builder.has_chunks:
            self._rows.drop_drafts(builder.drop_drafts())

    def _paid(self, launch: Launch, drafted: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.full_like(drafted, launch.sample_guesses)


def tokens_per_launch(tokens: int, accepted: int) -> float:
    """Tokens of a row that a launch brought, on average; 0 before the first. tokens: all that launches brought.
    accepted: of these, drafts. Who brings any brings one that was no draft: so many launches and rows were there."""
    return tokens / (tokens - accepted) if tokens > accepted else 0.0


def _brought(found: SampledTokens, rows: int) -> NDArray[np.int64]:
    """How many tokens there are of each row that was read. [rows]"""
    if isinstance(found.row, slice):
        return np.ones(rows, np.int64)
    return np.bincount(found.row, minlength=rows)


def draft_policy(
    choice: DraftChoice,
    rows: Rows,
    ledger: Ledger[Deferred],
    most_rows: int = 0,
    forced: int = 0,
    forced_rows: int = 0,
    along_masks: bool = True,
) -> DraftPolicy:
    """choice: of K, the drafts of a launch and row. most_rows, forced, forced_rows, along_masks:
    `SchedulerLimits.draft_rows`, `forced_drafts`, `forced_rows` and `guesses_along_masks`."""
    if not choice.most and not forced:
        return DraftPolicy(rows, ledger)
    if most_rows:
        return DraftForms(choice, rows, ledger, most_rows, forced, forced_rows, along_masks=along_masks)
    return Drafts(choice, rows, ledger, forced, forced_rows, along_masks=along_masks)
