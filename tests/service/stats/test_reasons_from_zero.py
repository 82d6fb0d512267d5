"""Counters by reason exist at 0 from the start: PromQL's `rate` misses the first event of a series otherwise."""

from __future__ import annotations

import ast

import msgspec

from runahead.cuda_graphs import buckets
from runahead.runtime.wire.figures import BARRIERS, FALLBACKS
from runahead.service.contract.errors import STATUS_OF
from runahead.service.shared_memory.board import REFUSALS, Board
from runahead.service.stats.metrics import engine_metrics, service_metrics
from tests.project.repository import calls, sources
from tests.service.fake_engine import INFO, STATS


def by_reason(families: object, name: str) -> dict[str, float]:
    (found,) = [family for family in families if family.name == name]  # type: ignore[attr-defined]
    return {sample.labels["reason"]: sample.value for sample in found.samples}


def test_before_anything_has_happened_every_reason_is_0() -> None:
    idle = msgspec.structs.replace(STATS, fallbacks={}, barriers={}, barrier_s={})
    of_engine = list(engine_metrics(INFO, idle))
    assert by_reason(of_engine, "runahead_fallbacks") == dict.fromkeys(FALLBACKS, 0)
    assert by_reason(of_engine, "runahead_barriers") == dict.fromkeys(BARRIERS, 0)
    assert by_reason(of_engine, "runahead_barrier_seconds") == dict.fromkeys(BARRIERS, 0)
    assert by_reason(service_metrics(Board(2)), "runahead_refusals") == dict.fromkeys(REFUSALS, 0)


def test_what_has_happened_is_counted_beside_the_others() -> None:
    board = Board(2)
    board.line(0).refuse("QUEUE_FULL")
    found = by_reason(service_metrics(board), "runahead_refusals")
    assert found == {**dict.fromkeys(REFUSALS, 0), "QUEUE_FULL": 1}


def test_no_reason_is_missing() -> None:
    """Reasons are words in the engine's code, and lists for whoever reads its figures."""
    assert set(FALLBACKS) == {buckets.CLOSING, buckets.DRAFTS, buckets.MIXED, buckets.PROMPT_LOGPROBS}
    drained = {
        argument.value
        for path in sources("runtime")
        for call in calls(path)
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("drain", "barrier") and call.args
        if isinstance(argument := call.args[0], ast.Constant) and isinstance(argument.value, str)
    }
    assert drained == set(BARRIERS)


def test_every_reason_that_refuses_a_call_is_counted() -> None:
    refusing = {code for reason, code in STATUS_OF.items() if reason in REFUSALS}
    of_an_open_stream = {"NOTHING_LEFT", "TOO_LONG", "STALLED_READER", "SLOW_READER"}
    assert {reason for reason, code in STATUS_OF.items() if code in refusing} - of_an_open_stream == set(REFUSALS)
