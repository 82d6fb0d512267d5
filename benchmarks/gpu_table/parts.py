"""The parts of the benchmark: each runs in a process of its own, in less than 8 minutes on one H200."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from benchmarks.gpu_table import results
from benchmarks.gpu_table.decode import Batch, Steps, bare_graphs, fill_cache, form_of, through_the_engine
from benchmarks.gpu_table.engines import Bench, opened
from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.floors import StepBytes, step_bytes
from benchmarks.gpu_table.kernel_times import LAUNCHES, on_the_gpu, traced
from benchmarks.gpu_table.results import Breakdown, Cell, Result, Sampling, Table
from benchmarks.gpu_table.settings import RUN_AHEAD, Settings, engine_settings
from benchmarks.gpu_table.shapes import SHAPES, Shape
from benchmarks.gpu_table.streams import served, through_grpc
from runahead.cuda_graphs.device import DeviceError
from runahead.runtime.scheduler.ledger import LedgerError
from runahead.runtime.wire.engine_config import DeviceName

DEPTHS: Final = (0, 1, 2, 3, 4)
MOST_ROWS: Final = 64  # of the tables that leave out the largest batch
_EVERYBODY: Final[tuple[Sampling, ...]] = ("greedy", "sampled")
_ONE_AMONG: Final[tuple[Sampling, ...]] = ("one sampled", "one with log-probabilities")


@dataclass(slots=True)
class Run:
    """How a part is run.

    limit_s: after so many seconds no further figure is begun. asked: settings of the engine that differ from what the
    part would choose. begun: on the monotonic clock.
    """

    device: DeviceName
    repeats: int
    limit_s: float
    commit: str
    asked: Settings = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)

    @property
    def took_s(self) -> float:
        return time.monotonic() - self.begun

    def settings(self, max_rows: int, context: int) -> Settings:
        """Of the engine, where they differ from the defaults."""
        return engine_settings(self.device, max_rows, context) | self.asked


@dataclass(frozen=True, slots=True)
class Found:
    """What a part has measured, and with which settings. failure: see `Result`."""

    settings: Settings
    cells: Sequence[Cell] = ()
    breakdowns: Sequence[Breakdown] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """minutes: what it takes on an H200, about. is_wanted: without being named."""

    name: str
    what: str
    minutes: int
    measure: Callable[[Run], Found]
    is_wanted: bool


def run_part(part: Part, run: Run) -> Result:
    """Measure everything that belongs to the part."""
    found = part.measure(run)
    asked = ", ".join(f"{name}={value}" for name, value in sorted(run.asked.items()))
    return Result(
        format=results.FORMAT,
        part=part.name,
        commit=run.commit,
        date=results.now(),
        seconds=round(run.took_s, 1),
        machine=results.this_machine(run.device),
        versions=results.these_versions(),
        settings=found.settings | {"repeats": run.repeats, "asked": asked},
        cells=tuple(found.cells),
        breakdowns=tuple(found.breakdowns),
        failure=found.failure,
    )


@dataclass(frozen=True, slots=True)
class Cells:
    """Figures of one table and one shape, as they are measured."""

    run: Run
    table: Table
    shape: Shape
    bytes_: StepBytes
    found: list[Cell] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def all(self, settings: Settings) -> Found:
        """What there is."""
        return Found(settings, self.found, failure="".join(self.failures))

    def add(self, batch: Batch, measure: Callable[[], Steps], *, lacks: str = "", **known: Any) -> None:
        """Measure a batch, unless the part's time is up or something is lacking. known: further fields of the cell."""
        context = batch.context(self.shape.workload)
        floor = self.bytes_.floor_ms(context * batch.rows)
        lacks = lacks or self._why_not()
        figures = {"skipped": lacks} if lacks else self._measured(measure)
        shortest, longest = min(batch.prompts), max(batch.prompts)
        cell = Cell(
            table=self.table,
            shape=self.shape.name,
            rows=batch.rows,
            prompt=f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}",
            context=context,
            sampling=batch.sampling,
            floor_ms=floor,
            **known,
            **figures,
        )
        self.found.append(cell)
        figure = cell.skipped or f"{cell.step_ms:.3f} ms, floor {floor:.3f}"
        depth = cell.run_ahead or "serial"
        print(
            f"{self.run.took_s:6.1f} s  {cell.shape} {cell.rows} x {cell.prompt}, {cell.sampling}, {cell.way}, "
            f"{depth}{'' if cell.captured else ', without graphs'}: {figure}",
            file=sys.stderr,
            flush=True,
        )

    def _why_not(self) -> str:
        if self.failures:
            return "a figure before it failed"
        return f"the part had run for {self.run.limit_s:.0f} s" if self.run.took_s > self.run.limit_s else ""

    def _measured(self, measure: Callable[[], Steps]) -> dict[str, Any]:
        """Fields of the cell. What was measured before a failure is kept: a GPU's time is dear."""
        try:
            return asdict(measure())
        except (BenchmarkError, DeviceError, LedgerError, torch.OutOfMemoryError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            return {"skipped": self.failures[0]}


def _bytes_on(device: DeviceName, shape: Shape) -> StepBytes:
    """In the dtype that the device computes in where no other is asked for."""
    config = shape.described()
    return step_bytes(config, torch.float32 if device == "cpu" else config.dtype)


# ------------------------------------------------------------ what the parts measure


def _step(shape: Shape, run: Run) -> Found:
    """Bare graphs and the engine, everybody greedy and everybody sampled, and one row that asks for more."""
    prompt, most = shape.workload.prompt, shape.batches[-1]
    with opened(shape, run.settings(most, shape.workload.context), shape.workload.chained) as bench:
        cells = Cells(run, "step", shape, _bytes_on(run.device, shape))
        fill_cache(bench, (prompt,) * most)
        for sampling in _EVERYBODY:
            for rows in shape.batches:
                batch, nodes = Batch((prompt,) * rows, sampling), bench.nodes(rows, form_of(sampling))
                cells.add(batch, partial(bare_graphs, bench, batch, run.repeats), way="graph", nodes=nodes)
                cells.add(batch, partial(through_the_engine, bench, batch, run.repeats), way="engine", nodes=nodes)
        rows = min(most, MOST_ROWS)
        for sampling in _ONE_AMONG:
            batch, nodes = Batch((prompt,) * rows, sampling), bench.nodes(rows, form_of(sampling))
            cells.add(batch, partial(through_the_engine, bench, batch, run.repeats), way="engine", nodes=nodes)
        return cells.all(bench.settings)


def _grpc(shape: Shape, run: Run) -> Found:
    """The service in a process of its own, one stream a row."""
    prompt, most = shape.workload.prompt, shape.batches[-1]
    settings = run.settings(most, shape.workload.context)
    with served(shape, settings) as service:
        cells = Cells(run, "step", shape, _bytes_on(run.device, shape))
        for sampling in _EVERYBODY:
            for rows in shape.batches:
                batch = Batch((prompt,) * rows, sampling)
                cells.add(batch, partial(through_grpc, service, batch, run.repeats), way="grpc")
        return cells.all(settings | {"run_ahead": RUN_AHEAD})


def _depths(shape: Shape, run: Run) -> Found:
    """Every depth, and the default one without graphs."""
    prompt, most = shape.workload.prompt, min(shape.batches[-1], MOST_ROWS)
    with opened(shape, run.settings(most, shape.workload.context), max(DEPTHS)) as bench:
        cells = Cells(run, "depths", shape, _bytes_on(run.device, shape))
        fill_cache(bench, (prompt,) * most)
        for rows in (shape.batches[0], most):
            batch = Batch((prompt,) * rows)
            measure = partial(through_the_engine, bench, batch, run.repeats)
            nodes = bench.nodes(rows, form_of("greedy"))
            for depth in DEPTHS:
                bench.set_depth(depth)
                cells.add(batch, measure, way="engine", run_ahead=depth, nodes=nodes)
            bench.set_depth(RUN_AHEAD)
            if run.device == "cuda":
                with bench.device.without_graphs():
                    cells.add(batch, measure, way="engine", captured=False)
        return cells.all(bench.settings)


def _lengths(shape: Shape, run: Run) -> Found:
    """Long contexts, and prompts of many lengths in one batch."""
    workload = shape.workload
    batches = [rows for rows in shape.batches if rows <= MOST_ROWS]
    with opened(shape, run.settings(batches[-1], workload.longest), max(DEPTHS)) as bench:
        cells = Cells(run, "lengths", shape, _bytes_on(run.device, shape))
        for prompts in (
            *((length,) * rows for length in workload.lengths for rows in batches),
            *(ragged(*workload.ragged, rows) for rows in batches[1:]),
        ):
            batch = Batch(prompts)
            needed = batch.blocks(workload, bench.block_size)
            lacks = ""
            if needed > bench.num_blocks - 1:
                lacks = (
                    f"it needs {needed:,} KV blocks of {bench.block_size} tokens; memory holds {bench.num_blocks - 1:,}"
                )
            cells.add(batch, partial(_after_its_prompts, bench, batch, run.repeats), lacks=lacks, way="engine")
        return cells.all(bench.settings)


def _after_its_prompts(bench: Bench, batch: Batch, repeats: int) -> Steps:
    fill_cache(bench, batch.prompts)
    return through_the_engine(bench, batch, repeats)


def ragged(shortest: int, longest: int, rows: int) -> tuple[int, ...]:
    """Prompts of evenly spaced lengths, in an order that is none, the same in every run."""
    lengths = np.linspace(shortest, longest, rows).round().astype(int)
    return tuple(np.random.default_rng(0).permutation(lengths).tolist())


def _kernels(shape: Shape, run: Run) -> Found:
    """Every kernel of a launch. Raises BenchmarkError without a GPU."""
    if run.device == "cpu":
        raise BenchmarkError("the CPU runs no kernels that could be traced: this part needs a GPU")
    on_the_gpu(lambda: None)  # tracing is set up before a graph is captured, or it may not see into graphs
    prompt, most = shape.workload.prompt, min(shape.batches[-1], MOST_ROWS)
    with opened(shape, run.settings(most, shape.workload.context), LAUNCHES + max(DEPTHS)) as bench:
        bytes_ = _bytes_on(run.device, shape)
        batches = [Batch((prompt,) * rows) for rows in (shape.batches[0], most)]
        return Found(bench.settings, breakdowns=[traced(bench, batch, bytes_) for batch in batches])


_KINDS: Final = (
    ("engine", "bare graphs, and through the engine", _step, {"0.6B": 3, "1B": 3, "8B": 6, "tiny": 1}),
    ("grpc", "through gRPC, one stream a row", _grpc, {"0.6B": 3, "1B": 3, "8B": 5, "tiny": 1}),
    ("depths", "serial and 1 to 4 launches ahead, with and without graphs", _depths, {"0.6B": 3, "8B": 5, "tiny": 1}),
    ("lengths", "long contexts and ragged lengths", _lengths, {"0.6B": 6, "1B": 4, "8B": 6, "tiny": 1}),
    ("kernels", "every kernel of a launch", _kernels, {"0.6B": 2, "8B": 3, "tiny": 1}),
)
PARTS: Final = {
    part.name: part
    for kind, what, measure, minutes in _KINDS
    for part in (
        Part(f"{kind}-{shape}", f"{shape}: {what}", about, partial(measure, SHAPES[shape]), shape != "tiny")
        for shape, about in minutes.items()
    )
}
