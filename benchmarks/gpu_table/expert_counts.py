"""How many experts the rows of a batch name in a layer: what of a model with experts a decode step has to read.

Greedy rows of random weights fall into the same loops, so that they name fewer than rows of texts would. So they are
counted in the measured steps, in a separate run: launch by launch without graphs, since nothing of them
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
from runahead.runtime.models.decoder import Decoder


def experts_named(bench: Bench, batch: Batch) -> float:
    """Measure the distinct experts that a decode step's rows choose in a layer: the mean over layers and steps of a
    long run. 0.0 without experts. Raises BenchmarkError where no step of the whole batch was seen."""

    def decode() -> None:
        tokens = bench.shape.workload.long
        submit(bench, batch, tokens)
        finish(bench)
        bench.front_end.check(batch.rows, tokens)

    if bench.model.device.type == "cpu":
        return named_while(decode, bench.model, batch.rows, in_reference_kernels)

    def without_graphs() -> None:
        with bench.device.without_graphs():
            decode()

    return named_while(without_graphs, bench.model, batch.rows, in_triton_kernels)


Watch = Callable[[int, list[torch.Tensor]], contextlib.AbstractContextManager[None]]


def named_while(work: Callable[[], None], model: Decoder, tokens: int, watch: Watch) -> float:
    """The mean over layers of the launches of so many query tokens that are enqueued one by one in `work`; 0.0: of a
    model without experts. Nothing is run where one token alone says how many there are.

    Raises BenchmarkError where no such launch was seen.
    """
    sparse = [layer.feed_forward for layer in model.weights.layers if isinstance(layer.feed_forward, Experts)]
    if not sparse:
        return 0.0
    if tokens == 1:
        return float(sparse[0].chosen)
    counted: list[torch.Tensor] = []
    with watch(tokens, counted):
        work()
    if not counted:
        raise BenchmarkError(f"no launch of {tokens} query tokens was seen to choose experts")
    return float(torch.stack(counted).double().mean())


@contextlib.contextmanager
def in_triton_kernels(tokens: int, counted: list[torch.Tensor]) -> Iterator[None]:
    """Notes how many experts each routing of so many tokens names, without waiting for it."""
    from runahead.runtime.kernels.triton.moe import layer as expert_layers
    from runahead.runtime.kernels.triton.moe.routing import route

    def counting(scores: torch.Tensor, *given: Any, **options: Any) -> Any:
        found = route(scores, *given, **options)
        if scores.shape[0] == tokens:
            first_of_some = (found.items[:, 1] == 0) & (found.items[:, 2] > 0)
            counted.append(first_of_some.sum())
        return found

    with mock.patch.object(expert_layers, "route", counting):
        yield


@contextlib.contextmanager
def in_reference_kernels(tokens: int, counted: list[torch.Tensor]) -> Iterator[None]:
    """The same of the kernels of the CPU."""
    route: Callable[..., Iterator[Any]] = on_the_cpu.route

    def counting(scores: Any, live: Any, *given: Any) -> Iterator[Any]:
        groups = list(route(scores, live, *given))
        if len(live) == tokens:
            counted.append(torch.tensor(len(groups)))
        return iter(groups)

    with mock.patch.object(on_the_cpu, "route", counting):
        yield
