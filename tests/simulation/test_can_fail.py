"""The simulator sees mistakes: each of these, made on purpose, breaks a seed soon, and what is left of it is small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runahead.runtime.engine.intake import Intake
from runahead.runtime.engine.live_requests import Registry, Tracked
from runahead.runtime.memory.block_pool import NO_SLOT
from runahead.runtime.scheduler.ledger import Ledger
from runahead.runtime.scheduler.outcomes import Deferred, Eviction, Release
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from tests.simulation.generate import make_script
from tests.simulation.life import Broken
from tests.simulation.script import Script, read_script
from tests.simulation.shrink import breaks, shrink

Early = Callable[[Ledger[Deferred], int, Deferred], int]


def let_go_early(monkeypatch: pytest.MonkeyPatch, when: Early) -> None:
    """The fence lets things go when `when` says so."""
    defer = Ledger.defer
    monkeypatch.setattr(
        Ledger, "defer", lambda ledger, number, resource: defer(ledger, when(ledger, number, resource), resource)
    )


def blocks_at_commit(ledger: Ledger[Deferred], number: int, resource: Deferred) -> int:
    return ledger.committed if isinstance(resource, Release) and resource.blocks else number


def slots_after_f(ledger: Ledger[Deferred], number: int, resource: Deferred) -> int:
    return number - 1 if isinstance(resource, Release) and resource.row_slot != NO_SLOT else number


def evicted_after_f(ledger: Ledger[Deferred], number: int, resource: Deferred) -> int:
    return number - 1 if isinstance(resource, Eviction) else number


def broken_seeds(count: int = 60, first: int = 0) -> Iterator[Broken]:
    """Yield how each of `count` seeds breaks, `first` and those behind it before the others."""
    for seed in (*range(first, count), *range(first)):
        broken = breaks(make_script(seed))
        if broken is not None:
            yield broken


def is_seen(broken: Broken | None) -> bool:
    """Something that the simulator looks at was wrong. A mistake that can't even be run as it is written was not seen:
    whatever it was put in place of, the engine would have stopped."""
    return broken is not None and not broken.what.endswith(("TypeError", "AttributeError", "NameError"))


# Seeds that break after few launches, where the first ones run long: the others are looked at after them.
FENCE_SOON: dict[Early, int] = {blocks_at_commit: 9, slots_after_f: 0, evicted_after_f: 30}


@pytest.mark.parametrize("early", FENCE_SOON)
def test_whatever_the_fence_lets_go_too_early_is_seen(monkeypatch: pytest.MonkeyPatch, early: Early) -> None:
    let_go_early(monkeypatch, early)
    assert is_seen(next(broken_seeds(first=FENCE_SOON[early]), None))


def test_a_broken_script_shrinks_is_kept_and_breaks_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(Rows, "still", lambda rows, slots, epochs: epochs >= 0)  # late tokens count
    broken = next(broken_seeds())
    assert is_seen(broken)
    small = shrink(broken, most_runs=60)
    assert small.what == broken.what
    assert len(small.script.asks) < len(broken.script.asks)
    path = tmp_path_factory.mktemp("kept") / "small.json"
    small.script.write(path)
    kept: Script = read_script(path)
    assert kept == small.script
    again = breaks(kept)
    assert again is not None and again.what == broken.what
    monkeypatch.undo()
    assert breaks(kept) is None


# ---------------------------------------------------------------- who is aborted, cancelled, refused

_end, _abort_one, _drop, _refusal = Intake._end, Intake._abort_one, Intake._drop, Intake._refusal


def a_neighbour_too(intake: Intake, request: Request) -> None:
    _end(intake, request)
    for other in intake._registry.all()[:1]:
        _end(intake, other.request)


def the_oldest_instead(intake: Intake, request: Request) -> None:
    _end(intake, intake._registry.all()[0].request)


def nobody(intake: Intake, request: Request) -> None:
    pass


def only_with_a_row(intake: Intake, request: Request) -> None:
    if request.row_slot != NO_SLOT:
        _end(intake, request)


def only_without_a_row(intake: Intake, request: Request) -> None:
    if request.row_slot == NO_SLOT:
        _end(intake, request)


def none_that_is_paused(intake: Intake, request: Request) -> None:
    if intake._scheduler.holdings.phase_of(request) != "PAUSED":
        _end(intake, request)


def without_a_word(intake: Intake, request: Request) -> None:
    intake._drop(intake._registry.by_id(request.request_id), FinishReason.ABORTED)


def finished_is_not_found(intake: Intake, request_id: str) -> str:
    outcome = _abort_one(intake, request_id)
    return "NOT_FOUND" if outcome == "ALREADY_FINISHED" else outcome


def early_is_forgotten(registry: Registry, request_id: str, now: float) -> bool:
    return False


def early_for_whoever_comes(registry: Registry, request_id: str, now: float) -> bool:
    return bool(registry._aborted_early)


def early_for_ever(registry: Registry, request_id: str, now: float) -> bool:
    return request_id in registry._aborted_early


def all_but_for_others(intake: Intake, owner: int, abort: m.Abort) -> Iterator[int]:
    ids = abort.request_ids
    if abort.all_requests:
        ids = tuple(tracked.request.request_id for tracked in intake._registry.of_owner(owner))
    outcomes = tuple(intake._abort_one(request_id) for request_id in ids)
    intake._links.send(owner, m.AbortResult(abort.call, ids, outcomes))
    yield 1


def cancelled_goes_on(intake: Intake, tracked: Tracked | None, reason: FinishReason) -> None:
    pass


def cancelled_is_told(intake: Intake, tracked: Tracked | None, reason: FinishReason) -> None:
    if tracked is not None:
        _end(intake, tracked.request)


def everybody_is_lost(intake: Intake, owner: int) -> Iterator[int]:
    for tracked in intake._registry.all():
        _drop(intake, tracked, FinishReason.CANCELLED)
        yield 1


def the_waiting_are_not_lost(intake: Intake, owner: int) -> Iterator[int]:
    for tracked in intake._registry.of_owner(owner):
        if tracked.request.row_slot != NO_SLOT:
            _drop(intake, tracked, FinishReason.CANCELLED)
        yield 1


def of_any_front_end(registry: Registry, owner: int, handle: int) -> Tracked | None:
    return next((tracked for tracked in registry.all() if tracked.request.handle == handle), None)


def now_and_then(intake: Intake, submit: m.Submit, needs_room: bool) -> m.Refused | None:
    is_hit = submit.handle % 7 == 3
    return m.Refused(submit.handle, "RESOURCE_EXHAUSTED", "no") if is_hit else _refusal(intake, submit, needs_room)


def free_rows_do_not_count(intake: Intake, submit: m.Submit, needs_room: bool) -> m.Refused | None:
    is_full = len(intake._scheduler.waiting) >= intake._max_queue
    return m.Refused(submit.handle, "RESOURCE_EXHAUSTED", "full") if is_full else _refusal(intake, submit, needs_room)


def the_queue_has_no_end(intake: Intake, submit: m.Submit, needs_room: bool) -> m.Refused | None:
    refusal = _refusal(intake, submit, needs_room)
    return None if refusal and refusal.code == "RESOURCE_EXHAUSTED" else refusal


def never_the_same_id_again(intake: Intake, submit: m.Submit, needs_room: bool) -> m.Refused | None:
    was_there = intake._registry.has_finished(submit.request_id)
    return m.Refused(submit.handle, "ALREADY_EXISTS", "no") if was_there else _refusal(intake, submit, needs_room)


MISTAKES: list[tuple[type, str, list[Callable[..., Any]]]] = [
    (Intake, "_end", [a_neighbour_too, the_oldest_instead, nobody, only_with_a_row, only_without_a_row]),
    (Intake, "_end", [none_that_is_paused, without_a_word]),
    (Intake, "_abort_one", [finished_is_not_found]),
    (Intake, "_abort", [all_but_for_others]),
    (Registry, "was_aborted_early", [early_is_forgotten, early_for_whoever_comes, early_for_ever]),
    (Intake, "_drop", [cancelled_goes_on, cancelled_is_told]),
    (Intake, "_lose", [everybody_is_lost, the_waiting_are_not_lost]),
    (Registry, "by_handle", [of_any_front_end]),
    (Intake, "_refusal", [now_and_then, free_rows_do_not_count, the_queue_has_no_end, never_the_same_id_again]),
]


SOON: dict[Callable[..., Any], int] = {
    a_neighbour_too: 2,
    the_oldest_instead: 2,
    nobody: 2,
    only_with_a_row: 2,
    only_without_a_row: 2,
    none_that_is_paused: 34,
    without_a_word: 2,
    finished_is_not_found: 5,
    all_but_for_others: 2,
    early_is_forgotten: 8,
    early_for_whoever_comes: 8,
    early_for_ever: 21,
    cancelled_goes_on: 1,
    cancelled_is_told: 1,
    everybody_is_lost: 23,
    the_waiting_are_not_lost: 36,
    free_rows_do_not_count: 1,
    the_queue_has_no_end: 17,
    never_the_same_id_again: 15,
}


@pytest.mark.parametrize(
    ("place", "name", "mistake"),
    [pytest.param(place, name, one, id=one.__name__) for place, name, mistakes in MISTAKES for one in mistakes],
)
def test_whoever_is_wrongly_ended_spared_or_refused_is_seen(
    monkeypatch: pytest.MonkeyPatch, place: type, name: str, mistake: Callable[..., Any]
) -> None:
    monkeypatch.setattr(place, name, mistake)
    assert is_seen(next(broken_seeds(first=SOON.get(mistake, 0)), None))
