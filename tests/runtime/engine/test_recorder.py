"""What the engine remembers of its newest launches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.figures import MAX_TRACED, LaunchTimes, Trace
from tests.runtime.chain import Chain, make_chain, no_step

DEPTHS = (0, 1, 2, 4)


def ticking() -> Callable[[], float]:
    """A clock that is a little later whenever it is read: what came first is seen."""
    now = [100.0]

    def read() -> float:
        now[0] += 1e-6
        return now[0]

    return read


def ran(run_ahead: int, requests: int = 3, max_tokens: int = 30) -> Chain:
    chain = make_chain(run_ahead, schedule=no_step, clock=ticking(), prefix_cache=False)
    for handle in range(1, requests + 1):
        chain.submit(handle, [5] * (7 * handle), max_tokens=max_tokens)
    chain.run()
    return chain


def asked(chain: Chain, launches: int) -> Trace:
    """By a front end, over the wire."""
    chain.tell(m.TraceQuery(7, launches))
    chain.turn()
    (reply,) = [message for _, message in chain.links.sent if isinstance(message, m.TraceReply)]
    assert reply.call == 7
    return reply.trace


def moments(times: LaunchTimes) -> list[float]:
    return [
        times.plan_s,
        times.stage_s,
        times.launch_s,
        times.enqueued_s,
        times.commit_s,
        times.publish_s,
        times.published_s,
    ]


@pytest.mark.parametrize("run_ahead", DEPTHS)
def test_each_launch_has_its_moments_in_their_order(run_ahead: int) -> None:
    chain = ran(run_ahead)
    trace = asked(chain, MAX_TRACED)
    assert [times.number for times in trace.launches] == list(range(1, chain.engine.ledger.retired + 1))
    for times in trace.launches:
        assert all(before < after for before, after in pairwise(moments(times)))
        assert times.enqueued_s < times.ended_s
        assert times.start_ns <= times.end_ns
    assert all(before.published_s < after.published_s for before, after in pairwise(trace.launches))
    assert all(before.end_ns <= after.start_ns for before, after in pairwise(trace.launches))


@pytest.mark.parametrize("run_ahead", DEPTHS)
def test_a_trace_agrees_with_the_figures(run_ahead: int) -> None:
    chain = ran(run_ahead)
    figures, launches = chain.engine.figures, asked(chain, MAX_TRACED).launches
    assert sum(times.overlapped for times in launches) == figures.overlapped
    assert (sum(times.overlapped for times in launches) > 0) is (run_ahead > 0)
    assert sum(times.first for times in launches) == figures.firsts_after_idle
    assert sum(times.end_ns - times.start_ns for times in launches) == figures.busy_ns
    assert {kind: sum(times.kind == kind for times in launches) for kind in figures.launches_by_kind} == dict(
        figures.launches_by_kind
    )
    assert sum(times.prompt_tokens for times in launches) == 7 + 14 + 21


def test_the_newest_are_remembered_and_no_more_than_so_many() -> None:
    chain = ran(2, requests=1, max_tokens=100)
    for handle in range(2, 5):
        chain.submit(handle, [5] * 9, max_tokens=100)
        chain.run()
    retired = chain.engine.ledger.retired
    assert retired > MAX_TRACED
    assert [times.number for times in asked(chain, MAX_TRACED).launches] == list(
        range(retired - MAX_TRACED + 1, retired + 1)
    )
    recorder = chain.engine.recorder
    assert [times.number for times in recorder.trace(3).launches] == list(range(retired - 2, retired + 1))
    assert (recorder._planned, recorder._committed) == ({}, {}), "nothing is kept of a launch beside that"


def test_of_waits_those_are_shown_that_its_launches_lie_between() -> None:
    chain = ran(2)
    trace = asked(chain, 5)
    assert trace.waits
    assert all(begin <= end for begin, end in trace.waits)
    assert all(end >= trace.launches[0].plan_s for _, end in trace.waits)
    assert len(trace.waits) < len(chain.engine.recorder.trace(MAX_TRACED).waits)


def test_before_the_first_launch_there_is_nothing_to_show() -> None:
    assert asked(make_chain(2), 10) == Trace((), ())


def test_a_launch_in_flight_is_not_shown() -> None:
    chain = make_chain(2, schedule=no_step, clock=ticking())
    chain.submit(1, [5] * 9, max_tokens=50)
    chain.turn_until(lambda: chain.engine.ledger.retired > 5)
    assert chain.engine.ledger.in_flight
    newest = chain.engine.recorder.trace(MAX_TRACED).launches[-1]
    assert newest.number == chain.engine.ledger.retired
