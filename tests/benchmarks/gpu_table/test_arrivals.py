"""Requests that arrive while others decode, measured on the CPU with a tiny model: the code that a GPU runs."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu_table.arrivals import Load, _times, arrived
from benchmarks.gpu_table.cells import Run
from benchmarks.gpu_table.engines import opened
from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.parts import PARTS, run_part
from benchmarks.gpu_table.prompts import SETTINGS
from benchmarks.gpu_table.results import Arrivals
from benchmarks.gpu_table.settings import RUN_AHEAD, engine_settings
from benchmarks.gpu_table.shapes import SHAPES
from benchmarks.gpu_table.tables import _arrival_table


def test_the_part_has_all_figures_at_serial_and_three_depths() -> None:
    found = run_part(PARTS["prompts-long-tiny"], Run("cpu", 1, 300.0, "0123456789ab"))
    assert not found.failure and not found.prompts
    assert [one.run_ahead for one in found.arrivals] == [0, 1, 2, 4]
    for one in found.arrivals:
        assert (one.requests, one.tokens, one.generated, one.skipped) == (5, 60, 12, "")
        assert one.tokens_s and one.first_p50_ms and one.first_p99_ms and one.gap_p99_ms
        assert one.first_p50_ms <= one.first_p99_ms
        assert one.overlap is not None and 0 <= one.overlap <= 1
        assert one.idle_between is not None and 0 <= one.idle_between < 1
        assert one.launches["mixed"] >= 1 and one.launches["decode"] > 5
        assert one.fallbacks == one.barriers == {}, "a CPU has no graphs"
        assert one.held_back is not None
    assert found.arrivals[0].overlap == 0.0
    lines = _arrival_table(found.arrivals)
    assert len(lines) == 2 + 2 + 4
    assert lines[4].startswith("| tiny | 5 x 60, 12 out | every 0.01 s | serial |")


def test_requests_that_come_at_once_are_a_part_too() -> None:
    (found,) = run_part(PARTS["prompts-burst-tiny"], Run("cpu", 1, 300.0, "0123456789ab")).arrivals
    assert (found.requests, found.run_ahead, found.every_s) == (7, 2, 0.0)
    assert found.tokens_s and "| at once | 2 |" in _arrival_table([found])[-1]


def test_fewer_requests_are_told_as_what_they_are() -> None:
    run = Run("cpu", 1, 300.0, "0123456789ab", requests=3)
    (found,) = run_part(PARTS["prompts-burst-tiny"], run).arrivals
    assert (found.requests, found.skipped) == (3, "")
    assert _arrival_table([found])[-1].startswith("| tiny | 3 x 24, 8 out | at once |")


def test_when_the_time_is_up_what_is_missing_says_so() -> None:
    found = run_part(PARTS["prompts-long-tiny"], Run("cpu", 1, -1.0, "0123456789ab"))
    assert {one.skipped for one in found.arrivals} == {"the part had run for -1 s"}
    assert _arrival_table(found.arrivals)[-1] == "- tiny 5 x 60, 4: the part had run for -1 s"


def test_an_engine_is_left_as_it_was_and_no_prompt_is_found_in_the_prefix_cache() -> None:
    load = Load(3, 40, 6, 0.005)
    with opened(SHAPES["tiny"], engine_settings("cpu", 3, 128) | SETTINGS["pace"], 4) as bench:
        bench.device.counters.fallbacks["mixed"] = bench.engine.figures.barriers["test"] = 3  # of before
        for depth in (4, 1):
            found = arrived(bench, load, depth)
            assert (found.fallbacks, found.barriers, found.run_ahead) == ({}, {}, depth)
            assert bench.is_as_opened and bench.engine.ledger.run_ahead == RUN_AHEAD
        counters = bench.engine.scheduler.tally.counters
        assert (counters["prompt_tokens"], counters["cached_tokens"]) == (2 * 3 * 40, 0)


def test_times_are_from_a_request_s_own_arrival_and_gaps_are_of_one_request() -> None:
    came = [(1.5, np.array([7])), (2.0, np.array([7, 8])), (2.75, np.array([8])), (4.0, np.array([7]))]
    firsts, gaps, last = _times({7: 1.0, 8: 1.25}, came)
    assert (firsts, sorted(gaps), last) == ([0.5, 0.75], [0.5, 0.75, 2.0], 4.0)
    with pytest.raises(BenchmarkError, match="1 of 3 requests brought no token"):
        _times({7: 1.0, 8: 1.0, 9: 1.0}, came)


def test_the_share_that_overlaps_is_held_against_its_goal() -> None:
    one = Arrivals(shape="8B", requests=64, tokens=8192, generated=512, every_s=0.25, run_ahead=2, overlap=0.985)
    assert "| 98.50% | met |" in _arrival_table([one])[-1]
    late = Arrivals(shape="8B", requests=64, tokens=8192, generated=512, every_s=0.25, run_ahead=1, overlap=0.979)
    assert "| 97.90% | missed |" in _arrival_table([late])[-1]
