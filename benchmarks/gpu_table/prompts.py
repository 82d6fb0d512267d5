"""Measures how long a prompt takes to its first token: alone, and beside rows that decode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_table.decode import Batch, decoding, finish, prompt_of, submit, turn_until
from benchmarks.gpu_table.engines import Bench
from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.settings import Settings
from benchmarks.gpu_table.shapes import Shape
from runahead.runtime.kernels.layer_products import idle_in, products_of
from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.weights import described
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.figures import MAX_TRACED, LaunchTimes
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import prepared_submit

MATRIX_RATE: Final = 780e12  # multiply-adds and sums a second, in bfloat16: measured on one H200
Setting = Literal["rate", "pace"]
SETTINGS: Final[dict[Setting, Settings]] = {
    # As fast as prompts can be: large launches, which the rows beside them wait for.
    "rate": {
        "prefill_chunk": 2048,
        "max_prefill_tokens": 8192,
        "mixed_prefill_tokens": 8192,
        "run_ahead_tokens": 1 << 20,
    },
    # Rows are held up little: small chunks, and one launch with prompt tokens queued.
    "pace": {"prefill_chunk": 256, "max_prefill_tokens": 256, "run_ahead_tokens": 512},
}
_TOKENS: Final = 2  # of a request whose first token is timed: one that ends with its first is never a decode row
_BUSY: Final = 24  # tokens that every row beside has before a prompt comes
_prompts = count(100_000)  # random ones, none of which is in the prefix cache


Came: TypeAlias = Sequence[tuple[float, NDArray[np.int64]]]  # seconds, and of which handles a token came then


@dataclass(frozen=True, slots=True)
class MixedIdle:
    """Shares of the device's time with launches that carry prompts, by its stamps: how long it had nothing to run
    before such a launch, and at most inside it, between the pieces of one that is no graph. None: there was none."""

    between: float | None
    inside: float | None


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Times to first tokens. met_ms: the longest of the warm-up, in which libraries may delay the host. runs_ms: of
    each prompt of each later repetition. gaps_ms: between the tokens of decoding rows. idle: of the launches with these
    prompts."""

    met_ms: float
    runs_ms: tuple[float, ...]
    gaps_ms: NDArray[np.float64]
    idle: MixedIdle

    @property
    def median_ms(self) -> float:
        return statistics.median(self.runs_ms)

    def gap_ms(self, percent: float) -> float | None:
        return float(np.percentile(self.gaps_ms, percent)) if len(self.gaps_ms) else None


def products_ms(config: ModelConfig, tokens: int) -> float:
    """Return the compute bound of the layers' products for this many tokens, in milliseconds."""
    numbers = sum(_weights_of_a_token(layer) for layer in described(config).layers)
    return 2 * numbers * tokens / MATRIX_RATE * 1e3


def _weights_of_a_token(layer: Layer) -> int:
    """Count the weights that a token is multiplied with: of experts, the chosen ones."""
    every = sum(linear.weight.numel() for linear in products_of(layer))
    return every - idle_in([layer])


def of_long_prompts(shape: Shape, longest: int) -> Shape:
    """The same model, for contexts of at least `longest` tokens."""
    positions = max(longest, shape.keys["max_position_embeddings"])
    return replace(shape, keys={**shape.keys, "max_position_embeddings": positions})


def first_tokens(bench: Bench, tokens: int, repeats: int, together: int = 1) -> FirstTokens:
    """Measure times to first tokens of `together` prompts at once: a warm-up, then `repeats` repetitions."""
    met, _ = _first_tokens(bench, tokens, together)
    runs, gaps, traced = [], [], []
    for _ in range(repeats):
        launched = bench.engine.ledger.launched
        took, between = _first_tokens(bench, tokens, together)
        runs += [seconds * 1e3 for seconds in took]
        gaps.append(between * 1e3)
        traced.append([each for each in bench.engine.recorder.trace(MAX_TRACED).launches if each.number >= launched])
    return FirstTokens(max(met) * 1e3, tuple(runs), np.concatenate(gaps), idle_of_mixed(traced))


def idle_of_mixed(traces: Sequence[Sequence[LaunchTimes]]) -> MixedIdle:
    """Sum the idle times of mixed launches. traces: consecutive launches, oldest first; the first one of a trace has no
    idle time before it."""
    busy = between = inside = 0
    for trace in traces:
        for before, launch in pairwise(trace):
            if launch.kind == "mixed":
                busy += launch.end_ns - launch.start_ns
                between += 0 if launch.first else max(0, launch.start_ns - before.end_ns)
                inside += launch.idle_inside_ns
    whole = busy + between
    return MixedIdle(between / whole, inside / whole) if whole else MixedIdle(None, None)


def new_request(bench: Bench, tokens: int, generated: int) -> tuple[int, m.Submit]:
    """The handle of a greedy request with a prompt of so many tokens that nobody had, and its message: prepared before
    any clock runs, as a front end would."""
    number = next(_prompts)
    return number, prepared_submit(
        number,
        f"p{number}",
        prompt_of(number, tokens, bench.model.config.vocab_size),
        SamplingParams(temperature=0.0),
        StoppingParams(max_tokens=generated, ignore_eos=True),
        block_size=bench.block_size,
    )


@contextmanager
def busy(bench: Bench, rows: int) -> Iterator[None]:
    """So many rows decode meanwhile."""
    workload, heard = bench.shape.workload, bench.front_end
    if rows:
        submit(bench, Batch((workload.prompt,) * rows), bench.engine.scheduler.limits.context_length - workload.prompt)
        turn_until(bench, lambda: heard.tokens >= rows * _BUSY and decoding(bench) == rows)
    yield
    heard.inbox.append(m.Abort(0, (), True))
    finish(bench)
    heard.tokens, heard.endings = 0, []


def _first_tokens(bench: Bench, tokens: int, together: int) -> tuple[list[float], NDArray[np.float64]]:
    """Seconds to the first token of each of so many prompts, which come at once, and between two tokens of each row
    beside, from the last before they came to the last first token."""
    came: list[tuple[float, NDArray[np.int64]]] = []

    def note(output: m.Output) -> None:
        came.append((time.perf_counter(), np.frombuffer(output.handles, np.int64)))

    asked = [new_request(bench, tokens, _TOKENS) for _ in range(together)]
    numbers = [number for number, _ in asked]
    bench.front_end.heard = note
    try:
        turn_until(bench, lambda: bool(came))  # of rows beside: gaps count from here
        before = len(came)
        bench.front_end.inbox += [message for _, message in asked]
        begun = time.perf_counter()

        def brought(number: int) -> list[float]:
            return [at for at, handles in came[before:] if number in handles]

        turn_until(bench, lambda: all(map(brought, numbers)))
        firsts = [at[0] for at in map(brought, numbers) if at]
        if len(firsts) < together:
            raise BenchmarkError(f"of {together} prompts of {tokens} tokens, {len(firsts)} brought something")
        turn_until(bench, lambda: all(len(brought(number)) == _TOKENS for number in numbers))
    finally:
        bench.front_end.heard = lambda output: None
    seen = [one for one in came if one[0] <= max(firsts)]
    return [at - begun for at in firsts], np.array(gaps_in(times_of(seen, but_for=numbers).values()))


def times_of(came: Came, but_for: Collection[int] = ()) -> dict[int, list[float]]:
    """When each token came, by handle. but_for: handles that do not count."""
    found: dict[int, list[float]] = {}
    for at, handles in came:
        for handle in handles.tolist():
            if handle not in but_for:
                found.setdefault(handle, []).append(at)
    return found


def gaps_in(times: Iterable[Sequence[float]]) -> list[float]:
    """Seconds between two tokens of the same request. times: of each request."""
    return [after - before for one in times for before, after in pairwise(one)]
