"""What a scheduler takes over from the launch before: seen, or switched off, by way of its policy of drafts."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.plan import LaunchPlan
from runahead.runtime.scheduler.ledger import Launch
from runahead.runtime.scheduler.outcomes import Commit
from runahead.runtime.scheduler.plan_builder import Planned
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.scheduler.steady_decode import KeptRows, SteadyDecode


class TakenOver:
    """Counts a scheduler's plans that continue the one before, the block borders in them, and its short commits.

    seen: "plans", "borders", "commits". steady: the newest one.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.seen: Counter[str] = Counter()
        self.steady: SteadyDecode | None = None
        self._plan, self._steady, self._kept = scheduler.plan, scheduler.drafts.steady_decode, scheduler.drafts.kept
        scheduler.plan = self._planned  # type: ignore[method-assign]
        scheduler.drafts.steady_decode = self._new_steady  # type: ignore[method-assign]
        scheduler.drafts.kept = self._new_kept  # type: ignore[method-assign]

    def _planned(self) -> Planned | None:
        planned = self._plan()
        if planned is not None and continues(planned.plan, self.steady):
            self.seen["plans"] += 1
            self.seen["borders"] += len(planned.plan.appends)
        return planned

    def _new_steady(self, plan: LaunchPlan, block_size: int) -> SteadyDecode | None:
        self.steady = self._steady(plan, block_size)
        return self.steady

    def _new_kept(self, launch: Launch, commit: Commit) -> KeptRows | None:
        kept = self._kept(launch, commit)
        return None if kept is None else _Counted(kept, self.seen)


class _Counted(KeptRows):
    """Kept rows whose commits are counted."""

    def __init__(self, kept: KeptRows, seen: Counter[str]) -> None:
        self._one, self._seen = kept, seen

    def commit(self, launch: Launch, cells: NDArray[np.int64]) -> Commit | None:
        commit = self._one.commit(launch, cells)
        self._seen["commits"] += commit is not None
        return commit


def continues(plan: LaunchPlan, steady: SteadyDecode | None) -> bool:
    """A plan of steady decode shares its rows with the plan that steady decode begins after."""
    return steady is not None and plan is not steady.plan and plan.rows is steady.plan.rows


def nothing_is_taken_over(scheduler: Scheduler) -> None:
    """Every plan is made anew, and every row of every commit looked at."""
    scheduler.drafts.steady_decode = lambda plan, block_size: None  # type: ignore[method-assign]
    scheduler.drafts.kept = lambda launch, commit: None  # type: ignore[method-assign]
