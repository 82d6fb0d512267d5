"""What a scheduler takes over from the launch before: seen, or switched off, by way of its policy of drafts."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.plan import LaunchPlan
from runahead.runtime.scheduler.course import Course
from runahead.runtime.scheduler.kept_rows import KeptRows
from runahead.runtime.scheduler.ledger import Launch
from runahead.runtime.scheduler.outcomes import Commit
from runahead.runtime.scheduler.planned import Planned
from runahead.runtime.scheduler.scheduler import Scheduler


class TakenOver:
    """Counts a scheduler's plans that continue the one before, the block borders in them, and its short commits.

    seen: "plans", "borders", "commits". course: the newest one.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.seen: Counter[str] = Counter()
        self.course: Course | None = None
        self._plan, self._course, self._kept = scheduler.plan, scheduler.drafts.course, scheduler.drafts.kept
        scheduler.plan = self._planned  # type: ignore[method-assign]
        scheduler.drafts.course = self._new_course  # type: ignore[method-assign]
        scheduler.drafts.kept = self._new_kept  # type: ignore[method-assign]

    def _planned(self) -> Planned | None:
        planned = self._plan()
        if planned is not None and continues(planned.plan, self.course):
            self.seen["plans"] += 1
            self.seen["borders"] += len(planned.plan.appends)
        return planned

    def _new_course(self, plan: LaunchPlan, block_size: int) -> Course | None:
        self.course = self._course(plan, block_size)
        return self.course

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


def continues(plan: LaunchPlan, course: Course | None) -> bool:
    """A plan of a course shares its rows with the plan that the course begins after."""
    return course is not None and plan is not course.plan and plan.rows is course.plan.rows


def nothing_is_taken_over(scheduler: Scheduler) -> None:
    """Every plan is made anew, and every row of every commit looked at."""
    scheduler.drafts.course = lambda plan, block_size: None  # type: ignore[method-assign]
    scheduler.drafts.kept = lambda launch, commit: None  # type: ignore[method-assign]
