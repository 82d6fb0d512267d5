"""Counts of calls by method, status and duration in shared memory.

Each process writes its own line; a sum adds lines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_GENERATION: Final = "runahead.v1.GenerationService"
_FACADE: Final = "vllm.grpc.engine.VllmEngine"
_HEALTH: Final = "grpc.health.v1.Health"
_UNARY, _SERVER_STREAM, _BIDI_STREAM = "unary", "server_stream", "bidi_stream"

# Type, service and method by the names of gRPC's usual metrics. `runahead.service.calls.access` has all methods.
METHODS: Final = (
    (_SERVER_STREAM, _GENERATION, "Generate"),
    (_UNARY, _GENERATION, "GenerateOnce"),
    (_UNARY, _GENERATION, "Abort"),
    (_UNARY, _GENERATION, "Stats"),
    (_SERVER_STREAM, _GENERATION, "WatchStats"),
    (_UNARY, _GENERATION, "Trace"),
    (_UNARY, _GENERATION, "GetModelInfo"),
    (_UNARY, _GENERATION, "Tokenize"),
    (_UNARY, _GENERATION, "Detokenize"),
    (_UNARY, _GENERATION, "RenderChat"),
    (_UNARY, _HEALTH, "Check"),
    (_UNARY, _HEALTH, "List"),
    (_SERVER_STREAM, _HEALTH, "Watch"),
    (_BIDI_STREAM, "grpc.reflection.v1.ServerReflection", "ServerReflectionInfo"),
    (_BIDI_STREAM, "grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo"),
    (_SERVER_STREAM, _FACADE, "Generate"),
    (_UNARY, _FACADE, "Abort"),
    (_UNARY, _FACADE, "HealthCheck"),
    (_UNARY, _FACADE, "GetModelInfo"),
    (_UNARY, _FACADE, "GetServerInfo"),
    (_UNARY, _FACADE, "GetLoads"),
    (_SERVER_STREAM, _FACADE, "GetTokenizer"),
    (_SERVER_STREAM, _FACADE, "SubscribeKvEvents"),
    # Unknown methods share one entry, because callers choose their names.
    ("unknown", "unknown", "unknown"),
)
CODES: Final = (
    "OK",
    "Canceled",
    "Unknown",
    "InvalidArgument",
    "DeadlineExceeded",
    "NotFound",
    "AlreadyExists",
    "PermissionDenied",
    "ResourceExhausted",
    "FailedPrecondition",
    "Aborted",
    "OutOfRange",
    "Unimplemented",
    "Internal",
    "Unavailable",
    "DataLoss",
    "Unauthenticated",
)
# Upper bounds in seconds: the usual ones of gRPC servers, and longer ones for streams of completions.
BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_INDEXES: Final = {f"/{service}/{method}": index for index, (_, service, method) in enumerate(METHODS)}
_BUCKETS: Final = len(BOUNDS_S) + 1
_STARTED, _NANOSECONDS, _ENDED = 0, 1, 2  # cells of a method: started, total time, ended by code, ended by time
_TIMES: Final = _ENDED + len(CODES)
_CELLS: Final = _TIMES + _BUCKETS
_UNAVAILABLE: Final = CODES.index("Unavailable")


@dataclass(frozen=True, slots=True)
class MethodFigures:
    """A method's counts. ended: by code, in the order of CODES. times: by bucket of BOUNDS_S, the last above every
    bound. sum_s: total time of ended calls.
    """

    started: int
    ended: tuple[int, ...]
    times: tuple[int, ...]
    sum_s: float


class CallLine:
    """One process's counts, written by it alone."""

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells

    def started(self, path: str) -> None:
        """Count a new call. path: `/service/method`."""
        self._cells[self._begin(path) + _STARTED] += 1

    def ended(self, path: str, code: int, seconds: float) -> None:
        """Count the call's end. code: status number."""
        begin, cells = self._begin(path), self._cells
        cells[begin + _NANOSECONDS] += round(seconds * 1e9)
        cells[begin + _ENDED + code] += 1
        cells[begin + _TIMES + bisect_left(BOUNDS_S, seconds)] += 1

    def end_open(self) -> None:
        """End a dead process's open calls as UNAVAILABLE, without a duration."""
        cells = self._cells
        for begin in range(0, len(METHODS) * _CELLS, _CELLS):
            ended = sum(cells[begin + _ENDED : begin + _TIMES].tolist())
            cells[begin + _ENDED + _UNAVAILABLE] += cells[begin + _STARTED] - ended

    def _begin(self, path: str) -> int:
        return _INDEXES.get(path, len(METHODS) - 1) * _CELLS


class CallTable:
    """All processes' counts. cells: int64 [`CallTable.size(lines)`]. lines: of processes."""

    def __init__(self, cells: memoryview, lines: int) -> None:
        self._cells = cells
        self._lines = lines

    @staticmethod
    def size(lines: int) -> int:
        """Return the number of cells for this many lines."""
        return lines * len(METHODS) * _CELLS

    def line(self, index: int) -> CallLine:
        """Return the line for its only writer. Earlier counts stay."""
        size = self.size(1)
        return CallLine(self._cells[index * size : (index + 1) * size])

    def total(self) -> Iterator[tuple[tuple[str, str, str], MethodFigures]]:
        """Yield sums over all lines for each method of METHODS."""
        words, size = self._cells.tolist(), self.size(1)
        for index, method in enumerate(METHODS):
            begin = index * _CELLS
            rows = [words[line * size + begin :][:_CELLS] for line in range(self._lines)]
            cells = [sum(column) for column in zip(*rows, strict=True)]
            ended, times = tuple(cells[_ENDED:_TIMES]), tuple(cells[_TIMES:])
            yield method, MethodFigures(cells[_STARTED], ended, times, cells[_NANOSECONDS] / 1e9)
