"""What a launch may bring of a row is asked of one policy, and of nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.cuda_graphs.rings import FORCED, SampledTokens
from runahead.runtime.plan import Chunk, LaunchPlan
from runahead.runtime.scheduler.drafts import FixedChoice, draft_policy
from runahead.runtime.scheduler.ledger import Launch, Ledger
from runahead.runtime.scheduler.outcomes import Commit, Deferred
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.scheduler.steady_decode import KeptRows, SteadyDecode
from tests.runtime.scheduler import played

KNOWN, DECODED, LONGEST = 5, 7, 20


def rows_of(*lengths: int, drafts: int = 0) -> Rows:
    """Rows with prompts of KNOWN tokens that are so long in launch 3, which holds them all; those that have decoded
    have so many drafts in it."""
    rows = Rows(len(lengths), 1, LONGEST)
    rows.known_len[:], rows.max_len[:], rows.last_launch[:] = KNOWN, LONGEST, 3
    rows.least_len[:] = rows.most_len[:] = rows.committed_len[:] = lengths
    rows.drafts[:] = np.where(rows.committed_len > KNOWN, drafts, 0)
    rows.first_sample[:] = np.where(rows.committed_len > KNOWN, 2, 4)
    return rows


def ledger_at(committed: int) -> Ledger[Deferred]:
    ledger: Ledger[Deferred] = Ledger(4, 512)
    ledger.launched, ledger.committed = 5, committed
    return ledger


def launch(number: int, slots: np.ndarray, sample_drafts: int = 0) -> Launch:
    size = slots.size
    shape = LaunchShape(number, size, Form.PLAIN, size, size, is_decode=True, sample_drafts=sample_drafts)
    epochs, samples = np.zeros(size, np.int64), np.ones(size, np.bool_)
    return Launch(shape, slots, epochs, samples, slots, epochs, samples, sample_guesses=sample_drafts)


def brought(*tokens: int) -> SampledTokens:
    """So many tokens of each row."""
    count, row = sum(tokens), np.repeat(np.arange(len(tokens)), tokens)
    offset = np.concatenate([np.arange(some) for some in tokens])
    none = np.zeros(count, np.bool_)
    held = np.flatnonzero(np.array(tokens) == 0)
    return SampledTokens(row, offset, np.zeros(count, np.int32), none, none, none, held)


def bounds(rows: Rows) -> list[tuple[int, int]]:
    return list(zip(rows.least_len.tolist(), rows.most_len.tolist(), strict=True))


def test_without_drafts_a_launch_brings_one_token_and_both_bounds_are_the_same() -> None:
    rows, slots = rows_of(KNOWN, DECODED, LONGEST - 2), np.arange(3)
    policy = draft_policy(FixedChoice(0), rows, ledger_at(1))
    assert policy.cells == 1
    assert policy.kv_tokens(slots, 0).tolist() == [KNOWN + 1, DECODED + 1, LONGEST - 1]
    policy.plan(slots, 0)
    assert bounds(rows) == [(length + 1, length + 1) for length in (KNOWN, DECODED, LONGEST - 2)]
    policy.tighten(launch(4, slots), slots, brought(1, 1, 1), None)
    assert bounds(rows) == [(length + 1, length + 1) for length in (KNOWN, DECODED, LONGEST - 2)]


@pytest.mark.parametrize(
    ("committed", "most"),
    [(1, [6, 10, 21]), (3, [6, 10, 21]), (4, [6, 8, 19])],
    ids=["not verified", "the launch with the drafts is", "the launch that verifies is"],
)
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_as_long_as_drafts_are_not_verified_all_of_them_may_be_kept(
    committed: int, most: list[int], drafts: int
) -> None:
    """The first token after a prompt comes alone; the blocks of no row reach beyond its last token but one.

    drafts: of the next launch, beside the two of the last.
    """
    rows, slots = rows_of(KNOWN, DECODED, 18, drafts=2), np.arange(3)
    policy = draft_policy(FixedChoice(3), rows, ledger_at(committed))
    assert policy.cells == 4
    assert policy.kv_tokens(slots, drafts).tolist() == [min(length + drafts, LONGEST - 1) for length in most]
    policy.plan(slots, drafts)
    assert rows.most_len.tolist() == most
    assert rows.drafts.tolist() == [drafts] * 3


def test_a_commit_brings_the_bounds_of_what_a_launch_may_bring_together_again() -> None:
    rows, slots = rows_of(DECODED, DECODED, DECODED, drafts=2), np.arange(3)
    policy = draft_policy(FixedChoice(3), rows, ledger_at(1))
    policy.plan(slots, 3)
    assert bounds(rows) == [(8, 10)] * 3
    rows.last_launch[:] = 4
    policy.tighten(launch(4, slots, 2), slots, brought(1, 2, 3), np.array([2, 2, 2], np.int8))
    assert bounds(rows) == [(8, 8), (9, 9), (10, 10)]
    assert (policy.drafted.tolist(), policy.accepted.tolist()) == ([3, 3, 0], [2, 1, 0])
    assert rows.drafted[:, :3].tolist() == [[1, 1, 0]] * 3
    assert rows.accepted[:, :3].tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]


def test_a_row_in_no_further_plan_was_allowed_for_nothing_that_could_be_taken_back() -> None:
    """Launch 4 has looked at the drafts of launch 3, and holds the row no more."""
    rows, slots = rows_of(DECODED, DECODED, drafts=2), np.arange(2)
    policy = draft_policy(FixedChoice(3), rows, ledger_at(3))
    policy.tighten(launch(4, slots, 2), slots, brought(1, 3), np.array([2, 2], np.int8))
    assert bounds(rows) == [(DECODED, DECODED), (DECODED + 2, DECODED + 2)]


def test_each_launch_in_flight_counts_with_its_own_drafts() -> None:
    """Launch 3 had two drafts, 4 has three, 5 has none."""
    rows, slots = rows_of(DECODED, drafts=2), np.zeros(1, np.intp)
    ledger = ledger_at(1)
    policy = draft_policy(FixedChoice(3), rows, ledger)
    seen = []
    for number, drafts in ((4, 3), (5, 0), (6, 1)):
        policy.plan(slots, drafts)
        rows.last_launch[:] = number
        seen.append(bounds(rows)[0])
    assert seen == [(8, 10), (9, 14), (10, 15)], "one each at least, and at most 1 + 2, then 1 + 3, then 1"
    for number, drafts, tokens in ((4, 2, 1), (5, 3, 4), (6, 0, 1)):
        policy.tighten(launch(number, slots, drafts), slots, brought(tokens), np.array([drafts], np.int8))
        ledger.committed = number
        seen.append(bounds(rows)[0])
    assert seen[3:] == [(10, 13), (13, 13), (13, 13)]


def test_a_row_that_may_be_held_stays_as_long_as_it_is_until_a_commit_says_more() -> None:
    rows, slots = rows_of(KNOWN, DECODED, DECODED), np.arange(3)
    rows.may_hold[:] = (True, True, False)
    ledger = ledger_at(1)
    policy = draft_policy(FixedChoice(0), rows, ledger)
    policy.plan(slots, 0)
    assert bounds(rows) == [(5, 6), (7, 8), (8, 8)]
    rows.last_launch[:] = (4, 4, 4)
    policy.tighten(launch(4, slots), slots, brought(0, 1, 1), None)
    assert bounds(rows) == [(5, 5), (8, 8), (8, 8)]
    ledger.committed = 5
    policy.plan(slots, 0)
    assert bounds(rows) == [(6, 6), (9, 9), (9, 9)], "nothing is open: each has a token more"


def test_a_row_that_is_held_and_in_no_plan_has_a_token_less_than_its_next_plan_counts_with() -> None:
    rows, slots = rows_of(DECODED), np.zeros(1, np.intp)
    rows.may_hold[:] = True
    policy = draft_policy(FixedChoice(0), rows, ledger_at(3))
    policy.tighten(launch(4, slots), slots, brought(0), None)
    assert bounds(rows) == [(6, 6)]


@pytest.mark.parametrize("guessed", [0, 1])
def test_where_drafts_have_forms_nothing_is_forced_beside_chunks_or_in_a_launch_of_many_rows(guessed: int) -> None:
    rows, slots = rows_of(DECODED, DECODED, DECODED), np.arange(3)
    rows.may_hold[:] = (True, False, False)
    policy = draft_policy(FixedChoice(guessed), rows, ledger_at(1), most_rows=4, forced=3, forced_rows=2)
    found = []
    for decoding, chunks in ((2, 0), (3, 0), (2, 1), (5, 0)):
        guesses = policy.choose(6, decoding, chunks)
        found.append((policy.most(slots, guesses), policy.most(slots[1:], guesses)))
    assert found == [(3, guessed), (guessed, guessed), (0, 0), (0, 0)]
    assert policy.cells == 4


def test_nobody_guesses_in_a_launch_whose_rows_all_have_grammars_unless_the_drafter_guesses_along_masks() -> None:
    rows, slots = rows_of(DECODED, DECODED, DECODED), np.arange(3)
    rows.may_hold[:] = (True, True, False)
    for along_masks in (False, True):
        policy = draft_policy(
            FixedChoice(2), rows, ledger_at(1), most_rows=4, forced=3, forced_rows=3, along_masks=along_masks
        )
        guesses = policy.choose(6, 2, 0)
        assert [policy.guesses(6, some, 0) for some in (slots, slots[1:], slots[2:])] == [guesses] * 3
        alone = policy.guesses(6, slots[:2], 0)
        assert (guesses, alone) == (2, 2 if along_masks else 0)
        assert policy.most(slots[:2], alone) == 3, "what grammars force is drafted all the same"
        assert policy.kv_tokens(slots[:2], alone).tolist() == policy.kv_tokens(slots[:2], guesses).tolist()


def test_what_a_launch_has_for_grammars_alone_is_not_counted_among_the_guesses_that_missed() -> None:
    """It has three drafts of a row, one of which a drafter may make."""

    class Learning(FixedChoice):
        def learn(self, number: int, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
            learnt.append((drafted.tolist(), accepted.tolist()))

    learnt: list[tuple[list[int], list[int]]] = []
    rows, slots = rows_of(DECODED, DECODED, drafts=1), np.arange(2)
    rows.may_hold[:] = (True, False)
    policy = draft_policy(Learning(1), rows, ledger_at(3), most_rows=4, forced=3, forced_rows=2)
    looked_at = np.array([3 | FORCED, 1], np.int8)
    policy.tighten(launch(4, slots, 3)._replace(sample_guesses=1), slots, brought(3, 1), looked_at)
    assert learnt == [([1], [0])]
    assert policy.drafted.tolist() == [2, 1, 1]


def test_launches_have_something_in_common_only_where_nothing_is_drafted() -> None:
    """Each of the others may bring another number of tokens, so that each is planned and committed by itself."""
    rows, slots = rows_of(DECODED), np.zeros(1, np.int32)
    flags, tokens, numbers = np.ones(1, np.bool_), np.zeros(1, np.int32), np.zeros(1, np.int64)
    plan = LaunchPlan(3, slots, flags, True, np.zeros((0, 3), np.int32))
    commit = Commit(3, slots.astype(np.intp), slots, tokens, numbers, numbers, ~flags, ())
    none, some = (draft_policy(FixedChoice(count), rows, ledger_at(1)) for count in (0, 2))
    for policy in (none, some):
        assert isinstance(policy.steady_decode(plan, 8), SteadyDecode) and isinstance(
            policy.kept(launch(3, slots), commit), KeptRows
        )
    assert some.steady_decode(plan._replace(drafts=2), 8) is None, "the launch has drafts"
    assert some.kept(launch(3, slots, 2), commit) is None, "it has looked at some"
    rows.most_len[:] += 1
    assert some.steady_decode(plan, 8) is None, "one before it has some that no commit has told of"
    rows.may_hold[:] = True
    for policy in (none, some):
        assert isinstance(policy.steady_decode(plan, 8), SteadyDecode), "a row that may be held has two bounds"
        assert isinstance(policy.kept(launch(3, slots), commit), KeptRows)
    beside_a_chunk = plan._replace(chunks=(Chunk(0, 0, np.zeros(3, np.int32), samples=True),))
    forced = draft_policy(FixedChoice(0), rows, ledger_at(1), forced=3, forced_rows=8)
    assert forced.steady_decode(beside_a_chunk, 8) is None, "what is drafted next hangs on how many rows decode by then"
    rows.may_hold[:], rows.most_len[:] = False, rows.least_len
    assert isinstance(forced.steady_decode(beside_a_chunk, 8), SteadyDecode), (
        "nothing is forced of a row without a grammar"
    )


class Asked:
    """The limits of a scheduler, and how often each of them is asked for."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return getattr(self._limits, name)


def test_no_other_part_of_the_scheduler_asks_how_many_drafts_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """`limits.drafts` is asked for once, where the policy is chosen, however requests begin, grow and are evicted."""
    monkeypatch.setattr(played, "SchedulerLimits", lambda *limits, **more: Asked(SchedulerLimits(*limits, **more)))
    game = played.Played(drafts=3, blocks=18, holds=0.2, has_state=True)
    for handle in range(1, 9):
        game.submit(handle, 5 * handle, 40, may_hold=handle % 2 == 0)
        game.turn()
    game.run()
    asked = cast(Asked, game.scheduler.limits).counts
    assert asked["max_prefill_tokens"] > 1, "limits are asked for in every launch"
    assert game.events["evicted"] > 0
    assert asked["drafts"] == 1
