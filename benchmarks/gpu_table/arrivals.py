"""Measures requests that arrive one after the other, or all at once, while those before them decode."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_table.decode import finish
from benchmarks.gpu_table.engines import Bench
from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.prompts import new_request
from benchmarks.gpu_table.results import Arrivals
from benchmarks.gpu_table.settings import RUN_AHEAD
from benchmarks.gpu_table.token_times import Came, gaps_in, times_of


@dataclass(frozen=True, slots=True)
class Load:
    """requests: of a prompt of so many tokens, with so many generated each. every_s: from one arrival to the next; 0:
    all at once."""

    requests: int
    tokens: int
    generated: int
    every_s: float = 0.0

    @property
    def facts(self) -> dict[str, Any]:
        """As a result has them."""
        return {
            "requests": self.requests, "tokens": self.tokens, "generated": self.generated, "every_s": self.every_s,
        }  # fmt: skip


def arrived(bench: Bench, load: Load, depth: int) -> Arrivals:
    """The whole load at a depth. Each prompt is a random one, so that none is in the prefix cache.

    Times are the host's, from when a request is handed to the loop of the engine. Raises BenchmarkError where a request
    has fewer tokens than it asked for.
    """
    bench.set_depth(depth)
    before = _moment(bench)
    began, came = _run(bench, load)
    after = _moment(bench)
    bench.front_end.check(load.requests, load.generated)
    bench.set_depth(RUN_AHEAD)
    firsts, gaps, last = _times(began, came)
    could = after["retired"] - before["retired"] - (after["firsts"] - before["firsts"])
    busy, between = after["busy_ns"] - before["busy_ns"], after["idle_ns"] - before["idle_ns"]
    of = max(1, busy + between)
    return Arrivals(
        shape=bench.shape.name,
        run_ahead=depth,
        **load.facts,
        tokens_s=load.requests * load.generated / (last - min(began.values())),
        first_p50_ms=_percent(firsts, 50),
        first_p99_ms=_percent(firsts, 99),
        gap_p50_ms=_percent(gaps, 50),
        gap_p99_ms=_percent(gaps, 99),
        overlap=(after["overlapped"] - before["overlapped"]) / max(1, could),
        idle_between=between / of,
        idle_inside=(after["inside_ns"] - before["inside_ns"]) / of,
        launches=dict(after["kinds"] - before["kinds"]),
        fallbacks=dict(after["fallbacks"] - before["fallbacks"]),
        barriers=dict(after["barriers"] - before["barriers"]),
        held_back=after["held_back"] - before["held_back"],
    )


def _run(bench: Bench, load: Load) -> tuple[dict[int, float], list[tuple[float, NDArray[np.int64]]]]:
    """When each request was handed in, by handle, and when tokens came, of which handles."""
    came: list[tuple[float, NDArray[np.int64]]] = []
    heard = bench.front_end
    waiting = [new_request(bench, load.tokens, load.generated) for _ in range(load.requests)]
    began: dict[int, float] = {}
    heard.heard = lambda output: came.append((time.perf_counter(), np.frombuffer(output.handles, np.int64)))
    begun = time.perf_counter()
    try:
        while waiting or len(bench.engine.registry) or bench.engine.intake.has_more:
            due = begun + len(began) * load.every_s
            if waiting and time.perf_counter() >= due:
                handle, message = waiting.pop(0)
                began[handle] = time.perf_counter()
                heard.inbox.append(message)
            elif len(bench.engine.registry) or bench.engine.intake.has_more:
                bench.engine.turn()
            else:
                time.sleep(max(0.0, due - time.perf_counter()))
        finish(bench)
    finally:
        heard.heard = lambda output: None
    return began, came


def _times(began: dict[int, float], came: Came) -> tuple[list[float], list[float], float]:
    """Seconds to the first token of each request, between two tokens of the same one, and when the last came.

    Raises BenchmarkError where a request had none.
    """
    times = times_of(came)
    if times.keys() != began.keys():
        raise BenchmarkError(f"{len(began) - len(times)} of {len(began)} requests brought no token")
    firsts = [at[0] - began[handle] for handle, at in times.items()]
    return firsts, gaps_in(times.values()), max(at[-1] for at in times.values())


def _percent(seconds: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(seconds, percent)) * 1e3 if seconds else None


def _moment(bench: Bench) -> dict[str, Any]:
    """What counts up."""
    figures = bench.engine.figures
    return {
        "retired": figures.retired,
        "firsts": figures.firsts_after_idle,
        "overlapped": figures.overlapped,
        "busy_ns": figures.busy_ns,
        "idle_ns": figures.idle_ns,
        "inside_ns": figures.idle_inside_ns,
        "held_back": figures.held_back,
        "kinds": Counter(figures.launches_by_kind),
        "fallbacks": Counter(bench.device.counters.fallbacks),
        "barriers": Counter(figures.barriers),
    }
