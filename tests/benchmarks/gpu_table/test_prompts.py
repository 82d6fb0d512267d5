"""First tokens, measured on the CPU with a tiny model: the code that a GPU runs, but for the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.gpu_table import prompts
from benchmarks.gpu_table.cells import Run
from benchmarks.gpu_table.engines import Bench, opened
from benchmarks.gpu_table.parts import PARTS
from benchmarks.gpu_table.prompts import (
    SETTINGS,
    MixedIdle,
    busy,
    first_tokens,
    gaps_in,
    idle_of_mixed,
    of_long_prompts,
    products_ms,
    times_of,
)
from benchmarks.gpu_table.results import PromptTime
from benchmarks.gpu_table.settings import engine_settings
from benchmarks.gpu_table.shapes import SHAPES, SMALL
from benchmarks.gpu_table.tables import _prompt_table
from runahead.runtime.wire.figures import LaunchTimes

TINY, ROWS, CONTEXT = SHAPES["tiny"], 3, 512


@pytest.fixture
def bench() -> Iterator[Bench]:
    with opened(TINY, engine_settings("cpu", ROWS + 1, CONTEXT) | SETTINGS["pace"], 4) as bench:
        yield bench


def test_a_prompt_is_timed_to_its_first_token_and_is_never_found_in_the_prefix_cache(bench: Bench) -> None:
    times = first_tokens(bench, 300, 3)
    counters = bench.engine.scheduler.tally.counters
    assert len(times.runs_ms) == 3 and all(took > 0 for took in times.runs_ms)
    assert counters["prompt_tokens"] == 4 * 300 and counters["cached_tokens"] == 0, "and one before those that count"
    assert not len(times.gaps_ms) and times.gap_ms(50) is None, "nobody was beside it"


def test_rows_beside_a_prompt_go_on_and_the_time_between_their_tokens_is_kept(bench: Bench) -> None:
    with busy(bench, ROWS):
        times = first_tokens(bench, 300, 2)
    assert times.idle.between is not None and times.idle.inside is not None
    assert 0 <= times.idle.between < 1 and 0 <= times.idle.inside < 1
    assert len(times.gaps_ms) >= ROWS, "every row had a token while the prompt ran"
    median, longest = times.gap_ms(50), times.gap_ms(100)
    assert median is not None and longest is not None and 0 < median <= longest
    assert bench.is_as_opened, "the rows beside have ended, and nothing is counted twice"
    assert bench.engine.figures.launches_by_kind["mixed"] > 3 * (300 // 256)


def test_what_the_first_prompt_of_a_size_meets_counts_neither_for_times_nor_gaps_nor_idle_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []  # launches before each prompt
    took = iter([([0.5], 0.4), ([0.1], 0.02), ([0.2], 0.03)])
    measured = prompts._first_tokens

    def as_if(bench: Bench, tokens: int, together: int) -> tuple[list[float], NDArray[np.float64]]:
        begun.append(bench.engine.ledger.launched)
        measured(bench, tokens, together)
        seconds, gap = next(took)
        return seconds, np.array([gap])

    def idle(traces: Sequence[Sequence[LaunchTimes]]) -> MixedIdle:
        firsts = [min(launch.number for launch in trace) for trace in traces]
        assert len(traces) == 2 and all(first >= before for first, before in zip(firsts, begun[1:], strict=True))
        return MixedIdle(0.25, 0.5)

    monkeypatch.setattr(prompts, "_first_tokens", as_if)
    monkeypatch.setattr(prompts, "idle_of_mixed", idle)
    times = first_tokens(bench, 300, 2)
    assert times.met_ms == 500 and times.runs_ms == (100, 200)
    assert times.gaps_ms.tolist() == [20, 30] and times.idle == MixedIdle(0.25, 0.5)


def test_of_prompts_that_come_at_once_each_has_its_own_time_and_gaps_count_until_the_last(bench: Bench) -> None:
    with busy(bench, ROWS - 1):
        times = first_tokens(bench, 300, 2, together=2)
    assert len(times.runs_ms) == 4 and times.met_ms > 0
    counters = bench.engine.scheduler.tally.counters
    assert (
        counters["prompt_tokens"] == 3 * 2 * 300 + (ROWS - 1) * TINY.workload.prompt and not counters["cached_tokens"]
    )
    assert len(times.gaps_ms) >= 2 * 2 * (ROWS - 1), "launches of 256 tokens: there are two, at least, a repetition"
    assert bench.is_as_opened


def test_products_take_as_long_as_their_multiplications_at_the_measured_rate() -> None:
    config = SHAPES["8B"].described()
    layers = 32 * (4096 * 6144 + 4096 * 4096 + 4096 * 28672 + 14336 * 4096)
    assert products_ms(config, 8192) == pytest.approx(2 * layers * 8192 / 780e12 * 1e3)
    assert 140 < products_ms(config, 8192) < 155


def test_a_token_s_products_are_those_of_the_experts_that_it_chooses_and_of_the_shared_one() -> None:
    """Of the shape of Granite 4.0 H Tiny: 36 layers of Mamba-2, 4 of attention, 6 of 64 experts and a shared one."""
    hidden, experts, shared = 1536, 6 * 3 * 512, 3 * 1024
    mixers = 36 * (6448 + 3072) + 4 * (2560 + 1536)
    numbers = hidden * (mixers + 40 * (64 + experts + shared))
    found = products_ms(SHAPES["7B-A1B"].described(), 2048)
    assert found == pytest.approx(2 * numbers * 2048 / 780e12 * 1e3)


def test_a_model_is_given_the_context_that_the_longest_prompt_needs() -> None:
    assert of_long_prompts(SHAPES["8B"], 33_024).described().max_position_embeddings == 33_024
    assert of_long_prompts(SHAPES["8B"], 600).described().max_position_embeddings == 32_768


def test_the_part_has_every_prompt_alone_and_beside_rows_for_both_settings() -> None:
    found = PARTS["prompts-tiny"].measure(Run("cpu", repeats=1, limit_s=600, commit="0" * 12))
    assert not found.failures
    asked = {(time.setting, time.rows, time.tokens, time.together) for time in found.prompts}
    alone = {(setting, rows, tokens, 1) for setting in SETTINGS for rows in (0, 3) for tokens in SMALL.first}
    assert asked == alone | {(setting, 3, 300, 2) for setting in SETTINGS}
    assert all(
        time.met_ms and time.first_token_ms and (time.gap_p99_ms is not None) == bool(time.rows)
        for time in found.prompts
    )
    lines = _prompt_table(found.prompts)
    assert len(lines) == 2 + 2 + len(asked)


def test_when_the_time_is_up_what_is_missing_says_so() -> None:
    found = PARTS["prompts-tiny"].measure(Run("cpu", repeats=1, limit_s=-1, commit="0" * 12))
    assert {time.skipped for time in found.prompts} == {"the part had run for -1 s"}
    assert all(time.first_token_ms is None and time.met_ms is None for time in found.prompts)


def test_the_table_holds_a_prompt_alone_against_its_goal() -> None:
    time = PromptTime(shape="8B", setting="rate", tokens=2048, rows=0, products_ms=36.0, first_token_ms=47.5)
    assert _prompt_table([time])[-1].endswith("| 50.0 | 48.0 | met |")
    beside = msgspec.structs.replace(time, rows=32, gap_p50_ms=9.0, gap_p99_ms=11.5)
    assert _prompt_table([beside])[-1].endswith("| 9.0 | 11.5 | – | – | – |")


def test_idle_time_is_held_against_its_goal_where_a_prompt_is_long() -> None:
    time = PromptTime(
        shape="8B", setting="rate", tokens=512, rows=0, products_ms=9.0, first_token_ms=12.0, idle_between=0.02,
        idle_inside=0.011,
    )  # fmt: skip
    assert "| 2.00% | 1.10% | missed |" in _prompt_table([time])[-1]
    assert "| 2.00% | 1.10% | – |" in _prompt_table([msgspec.structs.replace(time, tokens=511)])[-1]


def test_idle_time_is_of_launches_with_prompts_and_none_of_a_time_without_work() -> None:
    def launch(number: int, kind: str, start: int, end: int, inside: int = 0, first: bool = False) -> LaunchTimes:
        return LaunchTimes(number, kind, 1, 0, False, first, *(0.0,) * 8, start, end, inside)

    trace = [
        launch(1, "decode", 0, 100, inside=50), launch(2, "mixed", 110, 200, inside=5),
        launch(3, "decode", 230, 300), launch(4, "mixed", 900, 1000, first=True),
    ]  # fmt: skip
    idle = idle_of_mixed([trace])
    assert idle.between == pytest.approx(10 / 200) and idle.inside == pytest.approx(5 / 200)
    assert idle_of_mixed([trace[:1], []]) == MixedIdle(None, None)


def test_gaps_are_of_rows_and_not_of_the_prompt() -> None:
    came = [(1.0, np.array([7, 8])), (1.5, np.array([7, 9])), (4.0, np.array([8, 7, 9]))]
    assert sorted(gaps_in(times_of(came, but_for=[9]).values())) == [0.5, 2.5, 3.0]
