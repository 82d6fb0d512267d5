"""A plan comes with everything that making it brought about, and nothing of it is asked for afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np

from runahead.runtime.scheduler.ledger import Launch
from runahead.runtime.scheduler.plan_builder import Planned, launch_of
from tests.runtime.chain import make_chain, no_step
from tests.runtime.scheduler.played import Played, record_of


def record(launch: Launch) -> list[Any]:
    return [one.tolist() if isinstance(one, np.ndarray) else one for one in launch]


def test_the_record_of_a_launch_is_the_same_whenever_it_is_made_of_its_plan() -> None:
    """Also when later plans have been made, rows have crossed borders and prompts have ended meanwhile."""
    chain = make_chain(4, schedule=no_step, max_rows=4)
    scheduler, enqueue = chain.engine.scheduler, chain.ledger.enqueue
    made: list[Planned] = []
    plan = scheduler.plan

    def kept() -> Planned | None:
        planned = plan()
        if planned is not None:
            made.append(planned)
        return planned

    enqueued: list[Launch] = []

    def noted(launch: Launch) -> None:
        enqueued.append(launch)
        enqueue(launch)

    scheduler.plan = kept  # type: ignore[method-assign]
    chain.ledger.enqueue = noted  # type: ignore[method-assign]
    for handle in (1, 2, 3):
        chain.submit(handle, [handle + 2] * (20 * handle), max_tokens=30, ignore_eos=True)
    before: list[list[Any]] = []
    while chain.engine.scheduler.waiting or len(chain.engine.registry) or not enqueued:
        chain.turn()
        before += [record(launch) for launch in enqueued[len(before) :]]
    again = [
        launch_of(planned, launch.shape, first=launch.first, overlapped=launch.overlapped)
        for planned, launch in zip(made, enqueued, strict=True)
    ]
    assert [record(launch) for launch in again] == before
    assert any(launch.crossed_slots.size for launch in again) and any(launch.prompt_tokens for launch in again)


def test_an_event_goes_with_one_plan_alone() -> None:
    played = Played()
    played.submit(1, 40, 5)
    first = played.scheduler.plan()
    assert first is not None
    assert first.events == {"admitted": 1, "chunk": 1}
    assert not played.scheduler.tally.events, "the plan has them"
    played.ledger.enqueue(record_of(first, first=True))
    second = played.scheduler.plan()
    assert second is not None
    assert second.events == {"chunk": 1}
    assert first.events == {"admitted": 1, "chunk": 1}
