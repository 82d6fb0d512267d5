"""Measures decode steps: through the engine, and as bare replays of the graphs."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_table.engines import Bench
from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.results import Sampling
from benchmarks.gpu_table.settings import RUN_AHEAD
from benchmarks.gpu_table.shapes import Workload
from runahead.cuda_graphs.device import Form
from runahead.runtime.rounding import ceil_div
from runahead.runtime.scheduler.rows import RowPhase
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import prepared_submit

TEMPERATURE: Final = 0.8
TOP_P: Final = 0.9
_handles = count(1)  # a front end's numbers of its requests count up


def prompt_of(row: int, tokens: int, vocab_size: int) -> NDArray[np.int32]:
    """Random ids of a row's own, the same in every run; a longer one begins as a shorter one does. int32 [tokens]"""
    return np.random.default_rng(1000 + row).integers(2, vocab_size, tokens).astype(np.int32)


def sampling_of(row: int, sampling: Sampling) -> SamplingParams:
    """What a row asks for where the batch is sampled so."""
    chosen = sampling == "sampled" or (sampling == "one sampled" and row == 0)
    if chosen:
        return SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, seed=row)
    wants_logprobs = sampling == "one with log-probabilities" and row == 0
    return SamplingParams(temperature=0.0, seed=row, logprobs=0 if wants_logprobs else -1)


def form_of(sampling: Sampling) -> Form:
    """Which graph such a batch replays."""
    return Form.PLAIN if sampling == "greedy" else Form.FULL


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that decode together. prompts: tokens of each."""

    prompts: tuple[int, ...]
    sampling: Sampling = "greedy"

    @property
    def rows(self) -> int:
        return len(self.prompts)

    def context(self, workload: Workload) -> float:
        """Tokens that a row holds in the middle of what is measured, the mean over the rows."""
        return sum(self.prompts) / self.rows + workload.generated

    def blocks(self, workload: Workload, block_size: int) -> int:
        """KV blocks that the batch holds at its end."""
        return sum(ceil_div(tokens + workload.long, block_size) for tokens in self.prompts)


@dataclass(frozen=True, slots=True)
class Steps:
    """Measured decode steps. runs: seconds of the short and the long run. Others: see `Cell`; None: not known."""

    step_ms: float
    runs: tuple[tuple[float, float], ...] = ()
    idle_us: float | None = None
    overlap: float | None = None
    host_us: float | None = None
    launches: int | None = None
    not_one_graph: dict[str, int] | None = None


def through_the_engine(bench: Bench, batch: Batch, repeats: int) -> Steps:
    """As the other engines were measured: the time of many tokens of the whole batch, less that of few, over the rest.

    What the device and the engine say of their own time is of the launches between the two, in the long runs.
    """
    workload = bench.shape.workload
    runs, windows = [], []
    for _ in range(repeats):
        short, _ = _generate(bench, batch, workload.short)
        long, window = _generate(bench, batch, workload.long)
        runs.append((short, long))
        windows.append(window)
    launches = sum(window.launches for window in windows)
    if launches == 0:
        raise BenchmarkError("no launch retired between the first tokens and the last")
    return Steps(
        statistics.median(long - short for short, long in runs) / workload.steps * 1e3,
        tuple(runs),
        idle_us=sum(window.idle_ns for window in windows) / launches / 1e3,
        overlap=sum(window.overlapped for window in windows) / launches,
        host_us=sum(window.host_s for window in windows) / launches * 1e6,
        launches=launches,
        not_one_graph=_split(windows) if bench.device.replays_graphs else None,
    )


def _split(windows: Sequence[Window]) -> dict[str, int]:
    """Launches that were not one graph, by reason."""
    return dict(sum((window.fallbacks for window in windows), Counter[str]()))


def bare_graphs(bench: Bench, batch: Batch, repeats: int) -> Steps:
    """From start to start of launches that follow each other with nothing between but the device's own gap.

    The real engine fills the rows and plans every launch up to their ends; the plans wait in the staging ring. Then the
    graphs are replayed one behind the other, and no work of the host but these calls runs beside them. The time is the
    device's own, by the stamps at the launches' starts. The launches are those before which a row had from `short` to
    `long` tokens, the mean over the rows: as long contexts as in the other ways.
    """
    found = [_chained(bench, batch) for _ in range(repeats)]
    return Steps(statistics.median(step for step, _ in found), idle_us=statistics.median(idle for _, idle in found))


def _chained(bench: Bench, batch: Batch) -> tuple[float, float]:
    """Milliseconds a step, and microseconds idle between two."""
    engine, rows, workload = bench.engine, batch.rows, bench.shape.workload
    submit(bench, batch, workload.chained)
    enough = rows * (workload.short * 3 // 4)
    turn_until(bench, lambda: generated(bench) >= enough and decoding(bench) == rows)
    committed, each = engine.ledger.committed, generated(bench) / rows
    held = bench.device.hold()
    bench.queue_everything()
    engine.turn()
    finish(bench)
    bench.front_end.check(rows, workload.chained)
    bench.set_depth(RUN_AHEAD)
    wanted = [shape for shape in held if workload.short <= each + shape.number - 1 - committed < workload.long]
    whole = [shape.number for shape in wanted if shape.is_decode and shape.rows == shape.sample_rows == rows]
    if len(whole) != workload.steps:
        raise BenchmarkError(f"of {workload.steps} launches that should hold all {rows} rows, {len(whole)} did")
    slots = [bench.device.rings.slot(number) for number in whole]
    starts, ends = bench.device.rings.start_ns[slots], bench.device.rings.end_ns[slots]
    step_ns = (int(starts[-1]) - int(starts[0])) / (len(slots) - 1)
    return step_ns / 1e6, float(np.mean(starts[1:] - ends[:-1])) / 1e3


@dataclass(frozen=True, slots=True)
class Window:
    """Differences between two moments."""

    launches: int
    overlapped: int
    idle_ns: int
    host_s: float
    fallbacks: Counter[str]


def _generate(bench: Bench, batch: Batch, tokens: int) -> tuple[float, Window]:
    """Seconds from handing the batch in to its last token, and what happened between `short` and that."""
    rows, short = batch.rows, bench.shape.workload.short
    submit(bench, batch, tokens)
    begun = time.perf_counter()
    turn_until(bench, lambda: generated(bench) >= rows * short)
    before = _moment(bench)
    turn_until(bench, lambda: generated(bench) >= rows * (tokens - short))
    after = _moment(bench)
    turn_until(bench, lambda: not len(bench.engine.registry))
    took = time.perf_counter() - begun
    finish(bench)
    bench.front_end.check(rows, tokens)
    return took, Window(*(new - old for new, old in zip(after, before, strict=True)))  # type: ignore[operator]


def _moment(bench: Bench) -> tuple[int, int, int, float, Counter[str]]:
    figures, fallbacks = bench.engine.figures, Counter(bench.device.counters.fallbacks)
    return figures.retired, figures.overlapped, figures.idle_ns, bench.engine.times.host_s, fallbacks


def submit(bench: Bench, batch: Batch, tokens: int) -> None:
    """Hand the batch to the front end. What a real one would prepare is prepared here, before any clock runs."""
    vocab = bench.model.config.vocab_size
    bench.front_end.inbox += [
        prepared_submit(
            handle,
            f"r{handle}",
            prompt_of(row, length, vocab),
            sampling_of(row, batch.sampling),
            StoppingParams(max_tokens=tokens, ignore_eos=True),
            block_size=bench.block_size,
        )
        for row, length, handle in zip(range(batch.rows), batch.prompts, _handles, strict=False)
    ]


def generated(bench: Bench) -> int:
    """Tokens of the requests that run, since the last check."""
    return bench.front_end.tokens


def decoding(bench: Bench) -> int:
    """Rows past their prompts."""
    return int(np.count_nonzero(bench.engine.scheduler.rows.phase == RowPhase.DECODE))


def turn_until(bench: Bench, reached: Callable[[], bool]) -> None:
    engine = bench.engine
    while not reached() and (len(engine.registry) or engine.intake.has_more):  # until all have ended, at the latest
        engine.turn()


def finish(bench: Bench) -> None:
    """Turn until every request has ended and nothing is in flight."""
    engine = bench.engine
    while engine.intake.has_more or len(engine.registry) or engine.ledger.in_flight:
        engine.turn()


def fill_cache(bench: Bench, prompts: Sequence[int]) -> None:
    """Run prompts once, so that later runs find them in the prefix cache: how they got in is not what is measured."""
    submit(bench, Batch(tuple(prompts)), bench.shape.workload.short)
    finish(bench)
    bench.front_end.check(len(prompts), bench.shape.workload.short)
