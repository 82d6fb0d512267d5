"""Where the time of a decode launch goes, kernel by kernel, as the driver's tracing sees it under the engine."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_table.decode import Batch, finish, generated, submit, turn_until
from benchmarks.gpu_table.engines import Bench
from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.floors import StepBytes
from benchmarks.gpu_table.kernel_roles import role_of, roles_of
from benchmarks.gpu_table.results import Breakdown, KernelTime, RoleTime

LAUNCHES: Final = 20
_ON_THE_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")


class Ran(NamedTuple):
    """A kernel or a copy. Microseconds."""

    name: str
    begun_us: float
    took_us: float


Trace = Callable[[Callable[[], None]], list[Ran]]  # does some work, and says what ran on the device meanwhile


def on_the_gpu(work: Callable[[], None]) -> list[Ran]:
    """What the driver's tracing sees of the work, all of it waited for."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="runahead-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text(encoding="utf-8")))


def traced(bench: Bench, batch: Batch, bytes_: StepBytes, trace: Trace = on_the_gpu, experts: float = 0.0) -> Breakdown:
    """Trace LAUNCHES launches in the middle of a table's decode steps. Tracing slows them a little. experts: distinct
    ones that the rows choose in a layer.

    Raises BenchmarkError where no kernel is seen.
    """
    engine, workload = bench.engine, bench.shape.workload
    submit(bench, batch, workload.long)
    turn_until(bench, lambda: generated(bench) >= batch.rows * (workload.generated - LAUNCHES / 2))
    engine.drain("profile")
    before = engine.ledger.launched
    kernels = trace(lambda: turn_until(bench, lambda: engine.ledger.launched >= before + LAUNCHES))
    launched = range(before + 1, engine.ledger.launched + 1)
    starts = bench.device.rings.start_ns[[bench.device.rings.slot(number) for number in launched]]
    finish(bench)
    bench.front_end.check(batch.rows, workload.long)
    step_us = (int(starts[-1]) - int(starts[0])) / (len(launched) - 1) / 1e3
    context = batch.context(workload)
    return breakdown(kernels, len(launched), step_us, bench.shape.name, batch.rows, context, bytes_, experts)


def read_trace(trace: Mapping[str, Any]) -> list[Ran]:
    """What ran on the device, in the order in which it began. trace: in the format of Chrome's trace viewer."""
    events = (event for event in trace["traceEvents"] if event.get("cat") in _ON_THE_DEVICE and event.get("ph") == "X")
    return sorted((Ran(event["name"], event["ts"], event["dur"]) for event in events), key=lambda ran: ran.begun_us)


def breakdown(
    ran: Sequence[Ran],
    launches: int,
    step_us: float,
    shape: str,
    rows: int,
    context: float,
    bytes_: StepBytes,
    experts: float = 0.0,
) -> Breakdown:
    """Sum kernel times by role. ran: kernels of all launches, in order. experts: see `traced`. Raises BenchmarkError
    where nothing ran."""
    if not ran:
        raise BenchmarkError("the profiler has seen no kernel: is tracing allowed on this machine?")
    roles = _roles_of_all([kernel.name for kernel in ran], launches, bytes_.layers)
    by_kernel: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    own: defaultdict[tuple[str, str], float] = defaultdict(float)
    end_us = ran[0].begun_us  # of all work so far
    for kernel, role in zip(ran, roles, strict=True):
        by_kernel[kernel.name, role].append(kernel.took_us)
        before, end_us = end_us, max(end_us, kernel.begun_us + kernel.took_us)
        own[kernel.name, role] += end_us - before
    everything = sum(kernel.took_us for kernel in ran)
    kernels = [
        KernelTime(name, role, len(times) / launches, sum(times) / len(times), sum(times) / launches,
                   sum(times) / everything, own[name, role] / launches)
        for (name, role), times in by_kernel.items()
    ]  # fmt: skip
    return Breakdown(
        shape=shape,
        rows=rows,
        launches=launches,
        context=context,
        step_us=step_us,
        floor_us=bytes_.floor_ms(context * rows, experts, rows) * 1e3,
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.total_us)),
        roles=tuple(_role_times(kernels, lambda role: bytes_.role_floor_us(role, context * rows, experts, rows))),
    )


def _roles_of_all(names: Sequence[str], launches: int, layers: int) -> list[str]:
    """Launches of one graph run the same kernels in the same order; where they did not, names alone must do."""
    each, left = divmod(len(names), launches)
    one = list(names[:each])
    if left or any(list(names[at : at + each]) != one for at in range(0, len(names), each)):
        return [role_of(name) for name in names]
    return roles_of(one, layers) * launches


def _role_times(kernels: Iterable[KernelTime], floor_us: Callable[[str], float | None]) -> list[RoleTime]:
    totals: defaultdict[str, float] = defaultdict(float)
    own: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        totals[kernel.role] += kernel.total_us
        own[kernel.role] += kernel.own_us or 0.0
    ordered = sorted(totals.items(), key=lambda item: -own[item[0]])
    return [RoleTime(role, total, floor_us(role), own[role]) for role, total in ordered]
