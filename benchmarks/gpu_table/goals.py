"""Which goals a set of results meets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu_table.published import (
    GOALS_MS,
    GRPC_OVER_GRAPHS,
    IDLE_SHARE,
    ONE_SAMPLED_MS,
    REACHED_BEFORE_MS,
    Place,
    best_peer_ms,
    engine_over_graphs,
    sampling_adds_ms,
)
from benchmarks.gpu_table.results import Cell, Sampling, Way


class Steps:
    """The table of steps, looked up. Cells without a figure count as not measured."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = {(cell.shape, cell.rows, cell.way, cell.sampling): cell for cell in cells if cell.table == "step"}

    def cell(self, place: Place, way: Way, sampling: Sampling = "greedy") -> Cell | None:
        cell = self._cells.get((place.shape, place.rows, way, sampling))
        return cell if cell is not None and cell.step_ms is not None else None

    def ms(self, place: Place, way: Way, sampling: Sampling = "greedy") -> float | None:
        cell = self.cell(place, way, sampling)
        return None if cell is None else cell.step_ms

    def places(self) -> list[Place]:
        """In the order of shapes and rows."""
        return sorted({Place(shape, rows) for shape, rows, _, _ in self._cells})


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure may be `most` at most. found: None if it was not measured. digits: behind the point, to be shown."""

    what: str
    most: float
    found: float | None
    digits: int = 2

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        return "met" if self.found <= self.most else "missed"


def goals(steps: Steps) -> Iterator[Goal]:
    """All of them, measured or not."""
    for place, goal_ms in GOALS_MS.items():
        shape, rows = place
        name = f"{shape}, batch {rows}"
        engine, graph, grpc = (steps.ms(place, way) for way in ("engine", "graph", "grpc"))
        yield Goal(f"{name}: ms a step through the engine", goal_ms, engine)
        yield Goal(
            f"{name}: ms a step, no slower than the kernels alone once were", REACHED_BEFORE_MS[place], engine, 3
        )
        peer = best_peer_ms(place)
        if peer is not None:
            yield Goal(f"{name}: ms a step, no slower than the best of the other engines", peer, engine)
        yield Goal(f"{name}: engine over bare graphs", engine_over_graphs(rows), _ratio(engine, graph), 3)
        if place in GRPC_OVER_GRAPHS:
            yield Goal(f"{name}: gRPC over bare graphs", GRPC_OVER_GRAPHS[place], _ratio(grpc, graph), 3)
        yield Goal(f"{name}: idle between launches, of a step", IDLE_SHARE, idle_share(steps.cell(place, "engine")), 4)
        adds = sampling_adds_ms(rows)
        if adds is not None:
            yield Goal(f"{name}: ms that sampling adds", adds, _less(steps.ms(place, "engine", "sampled"), engine), 3)
        if rows == 64:
            one = steps.ms(place, "engine", "one sampled")
            yield Goal(f"{name}: ms that one row that samples adds", ONE_SAMPLED_MS, _less(one, engine), 3)


def idle_share(cell: Cell | None) -> float | None:
    """Of a step, between launches."""
    if cell is None or cell.idle_us is None or cell.step_ms is None:
        return None
    return cell.idle_us / 1e3 / cell.step_ms


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other is not None else None


def _less(one: float | None, other: float | None) -> float | None:
    return one - other if one is not None and other is not None else None
