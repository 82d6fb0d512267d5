"""Whole launches in Triton with rows that have grammars, whose masks come late: the tokens are those of the reference
with every mask in time."""

from __future__ import annotations

import pytest

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = [
    pytest.mark.timeout(600),  # a whole engine in Triton's interpreter takes its time
    # The interpreter's own way with a loop whose length is read on the device.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    # Lines that no row needs hold whatever memory held: nobody reads what is computed of them.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

from runahead.runtime.programs.cuda import program  # noqa: E402
from runahead.runtime.wire.parameters import FinishReason  # noqa: E402
from tests.runtime.kernels.drafted_engine import ChangingForms  # noqa: E402
from tests.runtime.kernels.masked_engine import long_requests, masked_engine, reference_engine, requests, served  # noqa: E402

MAX_ROWS = 4
REQUESTS = 7
OTHERS = ((0, False), (0, True), (1, False), (1, True), (2, False), (4, False), (4, True))


@pytest.mark.parametrize("run_ahead", [2, *(pytest.param(depth, marks=pytest.mark.large) for depth in (0, 1, 4))])
def test_the_tokens_are_those_of_the_reference_however_late_masks_come(run_ahead: int) -> None:
    expected = served(reference_engine(2, MAX_ROWS), requests(REQUESTS))
    under_test = masked_engine(DEVICE, run_ahead, MAX_ROWS, lag=2)
    found = served(under_test, requests(REQUESTS))
    assert found[:2] == expected[:2]
    assert under_test.engine.stats().held_rows > 5, "no mask came late"
    assert FinishReason.NOTHING_LEFT in found[1].values()
    assert FinishReason.END_OF_SEQUENCE in found[1].values()


@pytest.mark.large
@pytest.mark.parametrize("run_ahead", [0, 2, 4])
def test_a_head_guesses_beside_what_grammars_force_and_changes_no_token(run_ahead: int) -> None:
    """Of the rows without a grammar; those that are held keep the drafts that they have. Where nobody guesses, though
    something is forced, the head takes no step."""
    expected = served(reference_engine(2, MAX_ROWS), long_requests())
    under_test = masked_engine(DEVICE, run_ahead, MAX_ROWS, 2, drafts=ChangingForms(), forced=7, has_head=True)
    rows, guessed, steps = under_test.program.rows, list[int](), list[int]()
    guess = rows.guess

    def counted(num_rows: int, count: int) -> None:
        guess(num_rows, count)
        guessed.append(int(rows.drafts.drafted[rows.state.mask_epoch == 0].sum()))
        steps.append(count)

    rows.guess = counted
    found = served(under_test, long_requests())
    assert found[:2] == expected[:2]
    stats = under_test.engine.stats()
    assert stats.held_rows > 3, "no mask came late"
    assert stats.accepted[1] > 1, "nothing that was forced was kept"
    assert max(guessed) >= 3, "the row without a grammar had no guesses"
    assert {number > 0 for number in steps} == {False, True}


@pytest.mark.parametrize(
    ("run_ahead", "guesses"),
    [(2, True), *(pytest.param(depth, guesses, marks=pytest.mark.large) for depth, guesses in OTHERS)],
)
def test_drafts_change_no_token_however_late_masks_come(
    run_ahead: int, guesses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What grammars force, without a drafter and beside one whose number of guesses changes. One row slot of four has
    no drafts."""
    monkeypatch.setattr(program, "slots_with_drafts", lambda max_rows, draft_rows: max_rows - 1)
    expected = served(reference_engine(2, MAX_ROWS), long_requests())
    drafts = ChangingForms() if guesses else None
    under_test = masked_engine(DEVICE, run_ahead, MAX_ROWS, lag=2, drafts=drafts, forced=7 if guesses else 3)
    found = served(under_test, long_requests())
    assert found[:2] == expected[:2]
    stats = under_test.engine.stats()
    assert stats.held_rows > 3, "no mask came late"
    assert stats.accepted[1] > 1, "nothing that was forced was kept"
    assert FinishReason.NOTHING_LEFT in found[1].values()
