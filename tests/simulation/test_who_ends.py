"""Who is aborted, cancelled or refused, in scripts of a few requests: that one, and nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.script import DEPTHS, Event, Kind
from tests.simulation.small import ask, counts_of

FOUR = tuple(ask(handle, owner=1 + handle % 2) for handle in range(4))


@pytest.mark.parametrize("phase", ["WAITING", "PREFILL", "DECODE"])
def test_an_abort_ends_the_request_that_it_names_whatever_its_phase(phase: str) -> None:
    counts = counts_of(FOUR, Event(Kind.ABORT, 3 if phase == "WAITING" else 1, owner=1, phase=phase))
    assert counts[f"ended from outside: {phase}"] == counts["finished: ABORTED"] == 1 + len(DEPTHS)
    assert counts["finished: LENGTH"] == 3 * (1 + len(DEPTHS))


def test_an_abort_of_several_is_answered_for_each_of_them() -> None:
    counts = counts_of(FOUR, Event(Kind.ABORT, 3, owner=1, tokens=1, also=(1, 3, 0)))
    assert counts["several aborted at once"] == 1 + len(DEPTHS)
    assert counts["abort answered: ALREADY_FINISHED"] >= 1 + len(DEPTHS)  # the same id twice


def test_an_abort_of_all_ends_those_of_both_front_ends() -> None:
    counts = counts_of(FOUR, Event(Kind.ABORT_ALL, 0, owner=2, tokens=2))
    assert counts["finished: ABORTED"] == 4 * (1 + len(DEPTHS))


def test_an_abort_that_came_first_counts_for_one_request_of_that_id() -> None:
    twins = (ask(0), replace(ask(1, turn=4), request_id="r"), replace(ask(2, turn=6), request_id="r"))
    counts = counts_of(twins, Event(Kind.ABORT, 1, turn=2))
    assert counts["aborted before it came"] == counts["finished: ABORTED"] == 1 + len(DEPTHS)
    assert counts["finished: LENGTH"] == 2 * (1 + len(DEPTHS))


def test_a_lost_front_end_takes_its_own_requests_along_and_no_others() -> None:
    counts = counts_of(FOUR, Event(Kind.LOSE, 0, owner=2, tokens=3))
    assert counts["finished: CANCELLED"] == counts["finished: LENGTH"] == 2 * (1 + len(DEPTHS))


@pytest.mark.parametrize(("max_queue", "refused"), [(0, 2), (1, 1), (2, 0)])
def test_a_request_is_refused_when_so_many_wait_beyond_the_free_rows_and_not_before(
    max_queue: int, refused: int
) -> None:
    counts = counts_of(FOUR, max_queue=max_queue)
    assert counts["refused: RESOURCE_EXHAUSTED"] == refused * (1 + len(DEPTHS))


def test_an_id_may_be_used_again_once_its_request_has_ended() -> None:
    again = tuple(replace(ask(handle, turn=turn), request_id="r") for handle, turn in enumerate((0, 3, 200)))
    counts = counts_of(again)
    assert counts["refused: ALREADY_EXISTS"] == 1 + len(DEPTHS)
    assert counts["finished: LENGTH"] == 2 * (1 + len(DEPTHS))


@pytest.mark.parametrize("turn_work", [1, 4])
@pytest.mark.parametrize("kind", [Kind.ABORT_ALL, Kind.LOSE])
def test_those_who_end_over_several_turns_are_the_same_ones(kind: Kind, turn_work: int) -> None:
    """One by one, while the others go on: whoever ends by itself before its turn was not ended by somebody else."""
    crowd = tuple(ask(handle, owner=1 + handle % 2) for handle in range(12))
    counts = counts_of(crowd, Event(kind, 0, owner=2, tokens=2), turn_work=turn_work)
    runs = 1 + len(DEPTHS)
    ended = counts["finished: ABORTED" if kind is Kind.ABORT_ALL else "finished: CANCELLED"]
    assert counts["a message took several turns"] >= runs
    assert ended + counts["finished: LENGTH"] == 12 * runs
    assert ended > (6 if kind is Kind.ABORT_ALL else 3) * runs
