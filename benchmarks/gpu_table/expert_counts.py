"""How many experts the rows of a batch name in a layer: what of a model with experts a decode step has to read.

Greedy rows of random weights fall into the same loops, so that they name fewer than rows of texts would. So they are
counted in the very steps that are measured, in a run of its own: launch by launch without graphs, since nothing of them
comes to the host otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_table.decode import Batch, finish, submit
from benchmarks.gpu_table.engines import Bench
from benchmarks.gpu_table.errors import BenchmarkError
from runahead.runtime.kernels.layers import Experts
from runahead.runtime.kernels.reference import experts as on_the_cpu


def experts_named(bench: Bench, batch: Batch) -> float:
    """Of a layer, each counted once: the mean over layers and over the decode steps of a long run. 0.0: of a model
    without experts. Raises BenchmarkError where no step of the whole batch was seen."""
    sparse = [layer for layer in bench.model.weights.layers if isinstance(layer.feed_forward, Experts)]
    if not sparse:
        return 0.0
    chosen = sparse[0].feed_forward
    assert isinstance(chosen, Experts)
    if batch.rows == 1:
        return float(chosen.chosen)
    counted: list[torch.Tensor] = []
    watch = _watched_on_a_gpu if bench.model.device.type == "cuda" else _watched_on_the_cpu
    with watch(bench, batch.rows, counted):
        tokens = bench.shape.workload.long
        submit(bench, batch, tokens)
        finish(bench)
    bench.front_end.check(batch.rows, tokens)
    if not counted:
        raise BenchmarkError(f"no step of {batch.rows} rows was seen to choose experts")
    return float(torch.stack(counted).double().mean())


@contextlib.contextmanager
def _watched_on_a_gpu(bench: Bench, rows: int, counted: list[torch.Tensor]) -> Iterator[None]:
    from runahead.runtime.kernels.triton import expert_layers
    from runahead.runtime.kernels.triton.routing import route

    def counting(scores: torch.Tensor, *given: Any, **options: Any) -> Any:
        found = route(scores, *given, **options)
        if scores.shape[0] == rows:
            first_of_some = (found.items[:, 1] == 0) & (found.items[:, 2] > 0)
            counted.append(first_of_some.sum())
        return found

    with bench.device.without_graphs(), mock.patch.object(expert_layers, "route", counting):
        yield


@contextlib.contextmanager
def _watched_on_the_cpu(bench: Bench, rows: int, counted: list[torch.Tensor]) -> Iterator[None]:
    route: Callable[..., Iterator[Any]] = on_the_cpu.route

    def counting(scores: Any, live: Any, *given: Any) -> Iterator[Any]:
        groups = list(route(scores, live, *given))
        if len(live) == rows:
            counted.append(torch.tensor(len(groups)))
        return iter(groups)

    with mock.patch.object(on_the_cpu, "route", counting):
        yield
