"""The figures of one part's table, as they are measured one after the other."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Generic

from benchmarks.gpu_table.decode import Batch, Steps
from benchmarks.gpu_table.floors import StepBytes
from benchmarks.gpu_table.measured import Measured, Subject
from benchmarks.gpu_table.results import Cell, Table
from benchmarks.gpu_table.settings import Settings, engine_settings
from benchmarks.gpu_table.shapes import Shape
from runahead.runtime.wire.engine_config import DeviceName


@dataclass(slots=True)
class Run:
    """How a part is run.

    limit_s: after so many seconds no further figure is begun. asked: settings of the engine that differ from what the
    part would choose. ranks_only: a part about ranks leaves one GPU out. begun: on the monotonic clock.
    """

    device: DeviceName
    repeats: int
    limit_s: float
    commit: str
    asked: Settings = field(default_factory=dict)
    ranks_only: bool = False
    begun: float = field(default_factory=time.monotonic)

    @property
    def took_s(self) -> float:
        return time.monotonic() - self.begun

    @property
    def why_no_more(self) -> str:
        """Why no further figure is begun; empty while one may be."""
        return f"the part had run for {self.limit_s:.0f} s" if self.took_s > self.limit_s else ""

    def settings(self, max_rows: int, context: int) -> Settings:
        """Return the engine's settings that differ from the defaults."""
        return engine_settings(self.device, max_rows, context) | self.asked


@dataclass(frozen=True, slots=True)
class Cells(Generic[Subject]):
    """Measures and keeps the cells of one table and one shape."""

    run: Run
    table: Table
    shape: Shape
    bytes_: StepBytes
    measured: Measured[Subject]
    found: list[Cell] = field(default_factory=list)

    def add(
        self,
        batch: Batch,
        measure: Callable[[Subject], Steps],
        *,
        lacks: str = "",
        experts: float | None = None,
        **known: Any,
    ) -> None:
        """Measure a batch, unless the part's time is up or something is lacking. known: further fields of the cell."""
        context = batch.context(self.shape.workload)
        floor = self.bytes_.floor_ms(context * batch.rows, experts or 0.0, batch.rows)
        steps, skipped = None, lacks or self.run.why_no_more
        if not skipped:
            steps, skipped = self.measured.measure(measure)
        shortest, longest = min(batch.prompts), max(batch.prompts)
        cell = Cell(
            table=self.table,
            shape=self.shape.name,
            rows=batch.rows,
            prompt=f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}",
            context=context,
            sampling=batch.sampling,
            floor_ms=floor,
            experts=experts,
            skipped=skipped,
            **known,
            **({} if steps is None else asdict(steps)),
        )
        self.found.append(cell)
        figure = cell.skipped or f"{cell.step_ms:.3f} ms, floor {floor:.3f}"
        if experts is not None:
            figure += f" with {experts:.1f} experts a layer"
        depth = cell.run_ahead or "serial"
        print(
            f"{self.run.took_s:6.1f} s  {cell.shape} {cell.rows} x {cell.prompt}, {cell.sampling}, {cell.way}, "
            f"{depth}: {figure}",
            file=sys.stderr,
            flush=True,
        )
