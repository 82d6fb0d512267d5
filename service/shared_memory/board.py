"""The figures of all front ends in shared memory: each writes its own line and all read.

The service's figures and limits are sums over the lines, counts of calls by method, status and duration too. A dead
front end's counts stay on its line, and its replacement continues from there. The supervisor writes each process's
resources once a second, so `Stats` reads them without asking; each process counts its dropped log lines itself.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from runahead.service.shared_memory.held import HeldLine, HeldTable, Resource

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
_METHOD_CELLS: Final = _TIMES + _BUCKETS
_UNAVAILABLE: Final = CODES.index("Unavailable")

_CELLS: Final = 4  # of a process: pid, memory, descriptors, dropped lines
_BESIDE: Final = ("supervisor", "engine", "side_server")  # processes besides front ends

# Reasons of refused calls that are counted. `runahead.service.contract.errors.STATUS_OF` has all reasons.
REFUSALS: Final = (
    "INVALID_FIELD",
    "MALFORMED",
    "DUPLICATE_ID",
    "NO_MESSAGE",
    "SECOND_MESSAGE",
    "UPLOAD_TIMEOUT",
    "NO_CREDENTIALS",
    "UNKNOWN_CREDENTIALS",
    "NO_RIGHT",
    "NO_TOKENIZER",
    "NO_STRUCTURE",
    "NO_CHAT_TEMPLATE",
    "STRUCTURE_COST",
    "CHAT_COST",
    "STREAMS_LIMIT",
    "CALLER_STREAMS_LIMIT",
    "QUEUED_TOKENS_LIMIT",
    "CALLER_QUEUED_TOKENS_LIMIT",
    "TOKENIZING_LIMIT",
    "CALLER_TOKENIZING_LIMIT",
    "UPLOADS_LIMIT",
    "CALLER_UPLOADS_LIMIT",
    "QUEUE_FULL",
    "WATCHERS_LIMIT",
)


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
        for begin in range(0, len(METHODS) * _METHOD_CELLS, _METHOD_CELLS):
            ended = sum(cells[begin + _ENDED : begin + _TIMES].tolist())
            cells[begin + _ENDED + _UNAVAILABLE] += cells[begin + _STARTED] - ended

    def _begin(self, path: str) -> int:
        return _INDEXES.get(path, len(METHODS) - 1) * _METHOD_CELLS


class CallTable:
    """All processes' counts. cells: int64 [`CallTable.size(lines)`]. lines: of processes."""

    def __init__(self, cells: memoryview, lines: int) -> None:
        self._cells = cells
        self._lines = lines

    @staticmethod
    def size(lines: int) -> int:
        """Return the number of cells for this many lines."""
        return lines * len(METHODS) * _METHOD_CELLS

    def line(self, index: int) -> CallLine:
        """Return the line for its only writer. Earlier counts stay."""
        size = self.size(1)
        return CallLine(self._cells[index * size : (index + 1) * size])

    def total(self) -> Iterator[tuple[tuple[str, str, str], MethodFigures]]:
        """Yield sums over all lines for each method of METHODS."""
        words, size = self._cells.tolist(), self.size(1)
        for index, method in enumerate(METHODS):
            begin = index * _METHOD_CELLS
            rows = [words[line * size + begin :][:_METHOD_CELLS] for line in range(self._lines)]
            cells = [sum(column) for column in zip(*rows, strict=True)]
            ended, times = tuple(cells[_ENDED:_TIMES]), tuple(cells[_TIMES:])
            yield method, MethodFigures(cells[_STARTED], ended, times, cells[_NANOSECONDS] / 1e9)


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """A process's figures. pid: process id. resident_bytes: resident memory. log_lines_dropped: by all processes of
    this name; `ProcessTable.write` ignores it.
    """

    name: str
    pid: int
    resident_bytes: int
    descriptors: int
    log_lines_dropped: int = 0


class ProcessTable:
    """All processes. cells: int64 [`ProcessTable.size(front_ends)`]. front_ends: the maximum."""

    def __init__(self, cells: memoryview, front_ends: int) -> None:
        self._cells = cells
        self.names = (*_BESIDE, *(f"front_end_{number}" for number in range(1, front_ends + 1)))

    @staticmethod
    def size(front_ends: int) -> int:
        """Return the number of cells for this many front ends."""
        return 1 + _CELLS * (len(_BESIDE) + front_ends)

    @property
    def connections(self) -> int:
        """Return the open connections of the service's port."""
        return int(self._cells[0])

    def write(self, processes: Iterator[ProcessFigures], connections: int) -> None:
        """Write the running processes; others have ended."""
        self._cells[0] = connections
        found = {process.name: process for process in processes}
        for index, name in enumerate(self.names):
            begin, process = 1 + index * _CELLS, found.get(name)
            self._cells[begin] = 0 if process is None else process.pid
            if process is not None:
                self._cells[begin + 1] = process.resident_bytes
                self._cells[begin + 2] = process.descriptors

    def dropped_lines(self, name: str) -> memoryview:
        """Return the named process's count of dropped log lines, int64 [1]."""
        index = self.dropped_lines_index(name)
        return self._cells[index : index + 1]

    def dropped_lines_index(self, name: str) -> int:
        """Return that cell's index."""
        return _CELLS * (1 + self.names.index(name))

    def read(self) -> tuple[ProcessFigures, ...]:
        """Return the running processes' figures."""
        cells = self._cells[1 : 1 + _CELLS * len(self.names)].tolist()
        found = (ProcessFigures(name, *cells[index * _CELLS :][:_CELLS]) for index, name in enumerate(self.names))
        return tuple(process for process in found if process.pid)


@dataclass(slots=True)
class FrontEndCounters:
    """Counts of one or all front ends, with the fields of `FrontEndStats`.

    open_streams: held `Resource.STREAMS`. front_ends: serving ones. answered_by: the answering one, counted from 1,
        never summed.
    unread_bytes, waiting_texts, waiting_structures: sampled each second.
    """

    open_streams: int = 0
    stop_strings: int = 0
    cancelled: int = 0
    slow_readers: int = 0
    refused: int = 0
    front_ends: int = 0
    answered_by: int = 0
    unread_bytes: int = 0
    stats_watchers: int = 0
    waiting_texts: int = 0
    structures_compiled: int = 0
    structure_hits: int = 0
    structure_compile_us: int = 0
    waiting_structures: int = 0


_NAMES: Final = tuple(field.name for field in fields(FrontEndCounters) if field.name != "open_streams")
_OF_THE_LIVING: Final = (
    "front_ends",
    "unread_bytes",
    "stats_watchers",
    "waiting_texts",
    "waiting_structures",
)  # gauges, which a front end's death resets
_BEATS: Final = len(_NAMES) + len(REFUSALS)  # the cell after them
_WORDS: Final = _BEATS + 1
_BYTES: Final = 8


class Line(FrontEndCounters):
    """One front end's figures, visible to all as soon as they are set.

    held: what its calls hold. calls: their outcomes.
    """

    __slots__ = ("_cells", "calls", "held")
    _cells: memoryview
    held: HeldLine
    calls: CallLine

    def __init__(self, cells: memoryview, held: HeldLine, calls: CallLine) -> None:
        object.__setattr__(self, "_cells", cells)
        object.__setattr__(self, "held", held)
        object.__setattr__(self, "calls", calls)
        for name, value in zip(_NAMES, cells.tolist(), strict=False):
            setattr(self, name, value)

    @property
    def open_streams(self) -> int:  # type: ignore[override]
        return self.held.amount(Resource.STREAMS)

    def __setattr__(self, name: str, value: int) -> None:
        super().__setattr__(name, value)
        self._cells[_NAMES.index(name)] = value  # one aligned word, written atomically

    def beat(self) -> None:
        """Record a sign of life of its event loop."""
        self._cells[_BEATS] += 1

    def refuse(self, reason: str) -> None:
        """Count a refused call if its reason is in `REFUSALS`."""
        if reason in REFUSALS:
            self._cells[len(_NAMES) + REFUSALS.index(reason)] += 1


class Board:
    """All lines. lines: of front ends. memory: a shared file's descriptor with `Board.size(lines)` bytes; None for one
    process.
    """

    def __init__(self, lines: int = 1, memory: int | None = None) -> None:
        # The map keeps its file; -1 means anonymous memory.
        shared = memoryview(mmap.mmap(-1 if memory is None else memory, self.size(lines)))
        tables = self.size(lines) - HeldTable.size(lines)
        self._words = shared[:tables].cast("q")
        self._lines = lines
        self.processes = ProcessTable(self._words[lines * _WORDS :], lines)
        self.calls = CallTable(self._words[lines * _WORDS + ProcessTable.size(lines) :], lines)
        self.held = HeldTable(lines, shared[tables:])

    @staticmethod
    def size(lines: int) -> int:
        """Return the bytes for this many lines and the tables."""
        words = lines * _WORDS + ProcessTable.size(lines) + CallTable.size(lines)
        return words * _BYTES + HeldTable.size(lines)

    def line(self, index: int, apart: HeldTable | None = None) -> Line:
        """Return the line for its only writer. Clears what a previous writer held.

        apart: a separate table of held amounts for this line, outside the board's limits.
        """
        held = self.held.line(index) if apart is None else apart.line(0)
        return Line(self._cells(index), held, self.calls.line(index))

    def clear(self, index: int) -> None:
        """Clear the gauges of a dead front end and end its calls."""
        self.held.clear(index)
        self.calls.line(index).end_open()
        cells = self._cells(index)
        for name in _OF_THE_LIVING:
            cells[_NAMES.index(name)] = 0

    def dropped_lines_index(self, name: str) -> int:
        """Return the index of the 64-bit word in which the named process counts dropped log lines."""
        return self._lines * _WORDS + self.processes.dropped_lines_index(name)

    def total(self) -> FrontEndCounters:
        """Sum all lines."""
        lines = [self._cells(index)[: len(_NAMES)].tolist() for index in range(self._lines)]
        open_streams = int(self.held.in_all()[Resource.STREAMS])
        return FrontEndCounters(open_streams, *map(sum, zip(*lines, strict=True)))

    def serving(self) -> dict[int, int]:
        """Return the signs of life of each serving front end, by line."""
        serving = _NAMES.index("front_ends")
        lines = ((index, self._cells(index)) for index in range(self._lines))
        return {index: cells[_BEATS] for index, cells in lines if cells[serving]}

    def refusals(self) -> dict[str, int]:
        """Count refused calls by reason, without zeros."""
        lines = [self._cells(index)[len(_NAMES) : _BEATS].tolist() for index in range(self._lines)]
        counts = map(sum, zip(*lines, strict=True))
        return {reason: count for reason, count in zip(REFUSALS, counts, strict=True) if count}

    def _cells(self, index: int) -> memoryview:
        return self._words[index * _WORDS : (index + 1) * _WORDS]
