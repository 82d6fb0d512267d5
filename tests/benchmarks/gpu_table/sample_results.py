"""Results that nobody has measured, for tests of what is done with results."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_table.results import FORMAT, Cell, Machine, Result, Versions

H200 = Machine(gpu="NVIDIA H200", driver="580.1", cpu="Xeon", cores=16, system="Linux")
VERSIONS = Versions(python="3.12.3", torch="2.11.0+cu130", triton="3.6.0", cuda="13.0", grpc="1.85.1")


def cell(shape: str, rows: int, way: Any, step_ms: float | None, **changes: Any) -> Cell:
    """Of the table of steps."""
    base: dict[str, Any] = {
        "table": "step",
        "prompt": "512",
        "context": 672.0,
        "floor_ms": 0.1,
        "skipped": "" if step_ms is not None else "the part had run for 390 s",
    }
    return Cell(shape=shape, rows=rows, way=way, step_ms=step_ms, **(base | changes))


def result(part: str, *cells: Cell, **changes: Any) -> Result:
    base: dict[str, Any] = {
        "format": FORMAT,
        "commit": "0123456789ab",
        "date": "2026-11-22T06:00:00Z",
        "seconds": 200.0,
        "machine": H200,
        "versions": VERSIONS,
        "settings": {"repeats": 3},
    }
    return Result(part=part, cells=cells, **(base | changes))
