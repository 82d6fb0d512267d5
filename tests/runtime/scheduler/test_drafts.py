"""What a launch may bring of a row is asked of one policy, and of nothing else."""

from __future__ import annotations

import ast

import numpy as np
import pytest

from runahead.cuda_graphs.shape import Form, LaunchShape
from runahead.runtime.plan import LaunchPlan
from runahead.runtime.scheduler.course import Course
from runahead.runtime.scheduler.drafts import draft_policy
from runahead.runtime.scheduler.kept_rows import KeptRows
from runahead.runtime.scheduler.ledger import Launch, Ledger
from runahead.runtime.scheduler.outcomes import Commit, Deferred
from runahead.runtime.scheduler.result_cells import SampledTokens
from runahead.runtime.scheduler.rows import Rows
from tests.project.repository import ROOT, parsed, sources

KNOWN, DECODED, LONGEST = 5, 7, 20


def rows_of(*lengths: int) -> Rows:
    """Rows with prompts of KNOWN tokens that are so long in launch 3, which holds them all."""
    rows = Rows(len(lengths), 1, LONGEST)
    rows.known_len[:], rows.max_len[:], rows.last_launch[:] = KNOWN, LONGEST, 3
    rows.least_len[:] = rows.most_len[:] = rows.committed_len[:] = lengths
    return rows


def ledger_at(committed: int) -> Ledger[Deferred]:
    ledger: Ledger[Deferred] = Ledger(4, 512)
    ledger.launched, ledger.committed = 5, committed
    return ledger


def launch(number: int, slots: np.ndarray) -> Launch:
    shape = LaunchShape(number, slots.size, Form.PLAIN, slots.size, slots.size, is_decode=True)
    epochs, samples = np.zeros(slots.size, np.int64), np.ones(slots.size, np.bool_)
    return Launch(shape, slots, epochs, samples, slots, epochs, samples)


def test_without_drafts_a_launch_brings_one_token_and_both_bounds_are_the_same() -> None:
    policy, slots = draft_policy(0, rows_of(KNOWN, DECODED), ledger_at(1)), np.arange(2)
    assert policy.tokens == 1
    held = policy.held(slots)
    assert held.tolist() == [KNOWN + 1, DECODED + 1]
    assert policy.most(slots, held) is held


@pytest.mark.parametrize(
    ("committed", "most"),
    [(1, [6, 10, 21]), (3, [6, 10, 21]), (4, [6, 8, 19])],
    ids=["not verified", "the launch with the drafts is", "the launch that verifies is"],
)
def test_as_long_as_drafts_are_not_verified_all_of_them_may_be_kept(committed: int, most: list[int]) -> None:
    """The first token after a prompt comes alone; the blocks of no row reach beyond its last token but one."""
    policy, slots = draft_policy(2, rows_of(KNOWN, DECODED, 18), ledger_at(committed)), np.arange(3)
    assert policy.tokens == 3
    held = policy.held(slots)
    assert policy.most(slots, held).tolist() == most
    assert held.tolist() == [min(length + 2, LONGEST - 1) for length in most]


def test_a_commit_brings_the_bounds_of_what_a_launch_may_bring_together_again() -> None:
    rows, slots = rows_of(DECODED, DECODED, DECODED), np.arange(3)
    policy = draft_policy(2, rows, ledger_at(1))
    rows.plan_decode(slots, policy.most(slots, policy.held(slots)))
    assert (rows.least_len.tolist(), rows.most_len.tolist()) == ([8] * 3, [10] * 3)
    rows.last_launch[:] = 4
    brought = np.array([0, 1, 1, 2, 2, 2])  # one token of the first row, two of the second, three of the third
    columns = np.zeros(brought.size, np.int32), np.zeros(brought.size, np.bool_)
    found = SampledTokens(brought, np.array([0, 0, 1, 0, 1, 2]), columns[0], columns[1], columns[1])
    policy.tighten(launch(4, slots), slots, found)
    assert rows.least_len.tolist() == rows.most_len.tolist() == [8, 9, 10]


def test_launches_with_drafts_have_nothing_in_common() -> None:
    """Each may bring another number of tokens, so that each is planned and committed by itself."""
    rows, slots = rows_of(DECODED), np.zeros(1, np.int32)
    flags, tokens, numbers = np.ones(1, np.bool_), np.zeros(1, np.int32), np.zeros(1, np.int64)
    plan = LaunchPlan(3, slots, flags, True, np.zeros((0, 3), np.int32))
    commit = Commit(3, slots.astype(np.intp), slots, tokens, numbers, numbers, ~flags, ())
    none, some = (draft_policy(count, rows, ledger_at(1)) for count in (0, 2))
    assert isinstance(none.course(plan, 8), Course) and isinstance(none.kept(launch(3, slots), commit), KeptRows)
    assert some.course(plan, 8) is None and some.kept(launch(3, slots), commit) is None


def test_no_other_part_of_the_scheduler_asks_how_many_drafts_there_are() -> None:
    """`limits.drafts` is read once, where the policy is chosen."""
    asking = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources("runtime/scheduler", "runtime/memory")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr == "drafts" and "limits" in ast.unparse(node.value)
    ]
    assert len(asking) == 1 and asking[0].startswith("runtime/scheduler/scheduler.py"), asking
