"""Drafts: how many tokens a launch may bring for each row. No other module of the scheduler knows of drafts.

Without drafts a launch brings one token for each row that it samples. With K drafts F has 1 + K query tokens for each
decoding row: its newest token and K guesses. The next S keeps 1 to 1 + K tokens: the drafts that it would have sampled,
and the token that it samples after them. For K = 2, after a prompt of 5 tokens:

    launch                             10            11            12
    query tokens of its F              p p p p p     t d d         t d d
    tokens from its S                                1             1 to 3
    the row's length in its F, least   5             6             7
                             and most  5             6             9
    tokens that its blocks must hold   5             8             11

Each launch has a separate K, or two: rows with a grammar may have more drafts than the drafter makes, where their
grammars force the next tokens. A row that may be held (`Rows.may_hold`) brings no token if its mask is late: its length
may stay the same. When a launch is committed, its number of tokens is known and both bounds of each length are equal
again.
"""

from __future__ import annotations

import sys
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import FORCED, SampledTokens
from runahead.runtime.plan import LaunchPlan
from runahead.runtime.scheduler.ledger import Launch, Ledger
from runahead.runtime.scheduler.outcomes import Commit, Deferred
from runahead.runtime.scheduler.plan_builder import PlanBuilder
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.scheduler.steady_decode import KeptRows, SteadyDecode


class DraftPolicy:
    """One token for each row and launch, or none for a held row.

    drafted, accepted: int64 [most K], verified drafts of committed launches by draft position, and the right ones
    among them. cells: result cells of a row, 1 + the greatest K of any launch.
    """

    def __init__(
        self, rows: Rows, ledger: Ledger[Deferred], most: int = 0, forced: int = 0, *, along_masks: bool = True
    ) -> None:
        """Start without drafts. most: drafts of any row. forced: drafts of a row with a grammar, if there are more of
        them than guesses. along_masks: rows with a grammar may also have guesses."""
        self.cells = 1 + most
        self._forced = forced  # in the launch that is planned now
        self.drafted, self.accepted = np.zeros((2, most), np.int64)
        self._rows = rows
        self._ledger = ledger
        self._along_masks = along_masks

    def choose(self, number: int, rows: int, chunks: int) -> int:
        """Return how many guesses launch `number`, which is planned now, verifies of each row without a grammar.

        rows: rows that may decode in it. chunks: rows that may have a prompt chunk in it.
        """
        return 0

    def guesses(self, number: int, slots: NDArray[np.int64], chunks: int) -> int:
        """Return `choose` for these rows, [n]; 0 if the drafter guesses for none of them."""
        chosen = self.choose(number, slots.size, chunks)
        if chosen and not self._along_masks and np.count_nonzero(self._rows.may_hold[slots]) == slots.size:
            return 0
        return chosen

    def beside_admissions(self, builder: PlanBuilder) -> None:
        """Drop the launch's drafts if rows were admitted and drafts can't stand beside their chunks."""

    def most(self, slots: NDArray[np.int64], guesses: int) -> int:
        """Return K of a launch with these guesses: the most drafts of any of these rows, [n]."""
        return max(guesses, self._forced) if self._forced > guesses and self._may_hold(slots) else guesses

    def kv_tokens(self, slots: NDArray[np.int64], guesses: int) -> NDArray[np.int64]:
        """Return how many tokens the blocks of these rows must hold for the next launch, its drafts included, but
        nothing beyond the row's end. [n]"""
        tokens: NDArray[np.int64] = np.minimum(
            self._most(slots) + self._of_each(slots, guesses), self._rows.max_len[slots] - 1
        )
        return tokens

    def plan(self, slots: NDArray[np.int64], guesses: int) -> None:
        """Plan these rows, [n], as decode rows of the next launch."""
        self._rows.plan_decode(slots, self._least(slots), self._most(slots), self._of_each(slots, guesses))

    def _of_each(
        self, slots: NDArray[np.int64] | NDArray[np.intp], guesses: int, most: int | None = None
    ) -> NDArray[np.int64] | int:
        """Return the drafts of each of these rows, [n]. most: drafts of a row with a grammar; None: as in the launch
        that is planned now."""
        forced = self._forced if most is None else most
        if forced <= guesses or not self._may_hold(slots):
            return guesses
        found: NDArray[np.int64] = np.where(self._rows.may_hold[slots], forced, guesses)
        return found

    def tighten(
        self, launch: Launch, slots: NDArray[np.intp], found: SampledTokens, drafted: NDArray[np.int8] | None
    ) -> None:
        """Tighten the length bounds of a committed launch's rows.

        slots: [n] the rows that `found` was read from, with `committed_len` before the commit. drafted: [n] verified
        drafts of each row; None: the launch has none.
        """
        if self._may_hold(slots):
            self._rows.correct_bounds(slots, launch.number, _brought(found, slots.size))

    def steady_decode(self, plan: LaunchPlan, block_size: int) -> SteadyDecode | None:
        """Return the steady decode after this launch, or None if the next plans must be made anew."""
        return SteadyDecode(plan, self._rows, block_size)

    def kept(self, launch: Launch, commit: Commit) -> KeptRows | None:
        """Return what later commits have in common with this one if its rows stay, or None."""
        return KeptRows(launch, commit, self._rows)

    def _may_hold(self, slots: NDArray[np.intp] | NDArray[np.int32]) -> bool:
        """Return whether S may hold any of these rows. [n]"""
        return bool(np.count_nonzero(self._rows.may_hold[slots]))

    def _is_open(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows have logits that no committed S has sampled. [n]"""
        return self._rows.last_launch[slots] >= self._ledger.committed

    def _least(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the fewest tokens that these rows can have in the next F. [n]"""
        rows = self._rows
        least: NDArray[np.int64] = rows.least_len[slots] + 1
        return least - (rows.may_hold[slots] & self._is_open(slots)) if self._may_hold(slots) else least

    def _most(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the most tokens that these rows can have in the next F. [n]"""
        most: NDArray[np.int64] = self._rows.most_len[slots] + 1
        return most


class Drafts(DraftPolicy):
    """1 to 1 + K tokens a launch. The first token after a prompt comes alone, because nothing was drafted yet.

    K may change with each launch. While K stays 0, launches are in steady decode as without drafts, after all earlier
    launches are committed.
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
        """Return the most tokens that these rows can have in the next F: until its S is committed, the last F may keep
        all drafts. [n]"""
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
        # Before a row's first token F had a chunk and no drafts.
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
        """Count verified and accepted drafts. guessed: rows whose drafts are the drafter's; forced drafts do not
        measure the drafter. [n], [n], [n]"""
        index = np.arange(self.drafted.size)
        self.drafted += np.count_nonzero(drafted[:, None] > index, axis=0)
        self.accepted += np.count_nonzero(accepted[:, None] > index, axis=0)
        self._rows.count_drafts(slots, drafted, accepted)
        self._choice.learn(launch.number, self._paid(launch, drafted)[guessed], accepted[guessed])

    def _paid(self, launch: Launch, drafted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many drafts of each row the launch paid for, proposed or not. drafted: [n]"""
        return drafted

    def steady_decode(self, plan: LaunchPlan, block_size: int) -> SteadyDecode | None:
        rows, slots = self._rows, plan.rows
        if plan.drafts or (plan.chunks and (self._choice.most or self._may_hold(slots))):
            return None  # K was chosen for the decoding rows; after chunks, the next launch may have more of them
        if np.count_nonzero((rows.most_len[slots] - rows.least_len[slots])[~rows.may_hold[slots]]):
            return None
        return SteadyDecode(plan, rows, block_size, self._choice.stays_until(plan.number))

    def kept(self, launch: Launch, commit: Commit) -> KeptRows | None:
        return None if launch.shape.sample_drafts else super().kept(launch, commit)


class DraftForms(Drafts):
    """Launches with drafts are separate forms: at most `most_rows` rows, which all decode. Each row has the form's
    query tokens, with or without drafts."""

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
    """Return the average tokens of a row per launch; 0 before the first token.

    tokens: all tokens of the launches. accepted: of these, drafts. Each row and launch with a token has exactly one
    that was not a draft.
    """
    return tokens / (tokens - accepted) if tokens > accepted else 0.0


def _brought(found: SampledTokens, rows: int) -> NDArray[np.int64]:
    """Return the number of tokens of each row that was read. [rows]"""
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
    """Return the policy for a choice of K. most_rows, forced, forced_rows, along_masks: `SchedulerLimits.draft_rows`,
    `forced_drafts`, `forced_rows` and `guesses_along_masks`."""
    if not choice.most and not forced:
        return DraftPolicy(rows, ledger)
    if most_rows:
        return DraftForms(choice, rows, ledger, most_rows, forced, forced_rows, along_masks=along_masks)
    return Drafts(choice, rows, ledger, forced, forced_rows, along_masks=along_masks)


class DraftChoice(Protocol):
    """Chooses K for each launch that is planned anew, and learns from committed launches."""

    @property
    def most(self) -> int:
        """The greatest K of any launch."""

    def drafts(self, number: int, rows: int) -> int:
        """Return K of launch `number`. rows: how many rows may decode in it."""

    def stays_until(self, number: int) -> int:
        """Return the last launch that keeps the K of launch `number`, which was just planned, if its rows stay the
        same."""

    def learn(self, number: int, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Record launch `number`, the next committed launch with drafts. drafted, accepted: how many drafts of each row
        it verified, and how many were right. [n], [n]"""


class FixedChoice:
    """The same K for every launch."""

    def __init__(self, count: int) -> None:
        self.most: Final = count

    def drafts(self, number: int, rows: int) -> int:
        return self.most

    def stays_until(self, number: int) -> int:
        return sys.maxsize

    def learn(self, number: int, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        pass
