"""Calls in shared memory: what they hold of limited resources, in all and by caller, and how they have ended.

Each front end writes what its calls hold; totals are sums that every front end can compute alone. The supervisor clears
a dead front end's part. Counts by method, status and duration stay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

_GENERATION: Final = "runahead.v1.GenerationService"
_FACADE: Final = "vllm.grpc.engine.VllmEngine"
_HEALTH: Final = "grpc.health.v1.Health"
_UNARY, _SERVER_STREAM, _BIDI_STREAM = "unary", "server_stream", "bidi_stream"

# Type, service and method by the names of gRPC's usual metrics. `runahead.service.calls.admission` has all methods.
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
CODES: Final = tuple(
    "OK Canceled Unknown InvalidArgument DeadlineExceeded NotFound AlreadyExists PermissionDenied ResourceExhausted "
    "FailedPrecondition Aborted OutOfRange Unimplemented Internal Unavailable DataLoss Unauthenticated".split()
)
# Upper bounds in seconds: the usual ones of gRPC servers, and longer ones for streams of completions.
BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_INDEXES: Final = {f"/{service}/{method}": index for index, (_, service, method) in enumerate(METHODS)}
_BUCKETS: Final = len(BOUNDS_S) + 1
_STARTED, _NANOSECONDS, _ENDED = 0, 1, 2  # cells of a method: started, total time, ended by code, ended by time
_TIMES: Final = _ENDED + len(CODES)
_METHOD_CELLS: Final = _TIMES + _BUCKETS
_UNAVAILABLE: Final = CODES.index("Unavailable")


class Resource(IntEnum):
    """Limited resources. The value is the column in the table."""

    STREAMS = 0  # open completions
    QUEUED_TOKENS = 1  # prompt tokens from admission until the request has a row
    TOKENIZING_BYTES = 2  # texts that wait for or are in tokenization; ids that become text count 4 each
    UPLOADS = 3  # calls whose request is incomplete
    CONTROL_UPLOADS = 4  # the same for methods without work, such as Stats, which work must not keep out


Amounts = Mapping[Resource, int]

ROWS: Final = 1024  # of callers that hold something in one front end
_WORD: Final = np.dtype(np.int64)
# Rows without a caller, by the number in place of a caller's.
_ALL, _OTHERS = 0, 1  # the sum over all; callers without a row, treated as one caller


class HeldTable:
    """Owners of rows, int64 [lines, rows], held amounts, int64 [lines, rows, resources], and amounts given back so far,
    int64 [lines, resources].

    memory: `size` bytes, all 0 at first.
    """

    def __init__(self, lines: int, memory: memoryview) -> None:
        words = np.frombuffer(memory, _WORD)
        rows, kinds = lines * (ROWS + 2), len(Resource)
        self._whose = words[:rows].reshape(lines, -1)
        self._held = words[rows : rows * (1 + kinds)].reshape(lines, -1, kinds)
        self._left = words[rows * (1 + kinds) :].reshape(lines, kinds)

    @staticmethod
    def size(lines: int) -> int:
        """Return the size in bytes."""
        return lines * ((ROWS + 2) * (1 + len(Resource)) + len(Resource)) * _WORD.itemsize

    def in_all(self) -> NDArray[np.int64]:
        """Return everybody's amounts, int64 [resources]."""
        return np.asarray(self._held[:, _ALL].sum(0))

    def left(self) -> NDArray[np.int64]:
        """Return the amounts given back since the service began, int64 [resources]."""
        return np.asarray(self._left.sum(0))

    def of(self, number: int) -> NDArray[np.int64]:
        """Return one caller's amounts, int64 [resources]. number: from `HeldLine.number_of`."""
        if number == _OTHERS:
            return np.asarray(self._held[:, _OTHERS].sum(0))
        return np.asarray(self._held[np.nonzero(self._whose == number)].sum(0))

    def clear(self, line: int) -> None:
        """Clear a front end's line."""
        self._whose[line] = 0
        self._held[line] = 0

    def line(self, index: int) -> HeldLine:
        """Return the line for its only writer. Clears a dead predecessor's amounts."""
        self.clear(index)
        return HeldLine(self._whose[index], self._held[index], self._left[index])


@lru_cache(maxsize=4096)
def _number_of(caller: str) -> int:
    """Hash a caller to a number, equal in every process and different from `_ALL` and `_OTHERS`."""
    return int.from_bytes(blake2b(caller.encode(), digest_size=7).digest()) + 2


class HeldLine:
    """The amounts held by one front end's calls, written by it alone."""

    def __init__(self, whose: NDArray[np.int64], held: NDArray[np.int64], left: NDArray[np.int64]) -> None:
        self._whose = whose
        self._held = held
        self._left = left
        self._rows: dict[int, int] = {}  # by caller number
        self._free = list(range(len(whose) - 1, _OTHERS, -1))

    def number_of(self, caller: str) -> int:
        """Return a caller's number, equal in every front end, or `_OTHERS` if no row is left here."""
        number = _number_of(caller)
        return number if self._free or number in self._rows else _OTHERS

    def amount(self, resource: Resource) -> int:
        """Return this front end's amount."""
        return int(self._held[_ALL, resource])

    @contextmanager
    def holding(self, number: int, amounts: Amounts) -> Iterator[Holding]:
        """Hold amounts while the body runs, or until they are given back."""
        holding = Holding(self, number, amounts)
        try:
            yield holding
        finally:
            holding.close()

    def add(self, number: int, amounts: Amounts) -> None:
        """Add amounts, which may be negative."""
        row = self._row_of(number)
        for resource, amount in amounts.items():
            self._held[row, resource] += amount
            self._held[_ALL, resource] += amount
            self._left[resource] += max(0, -amount)
        if row != _OTHERS and not self._held[row].any():
            self._whose[row] = 0
            del self._rows[number]
            self._free.append(row)

    def _row_of(self, number: int) -> int:
        if number == _OTHERS:
            return _OTHERS
        row = self._rows.get(number)
        if row is None:
            row = self._rows[number] = self._free.pop()
            self._whose[row] = number
        return row


class Holding:
    """The amounts held by one call. number: the caller's."""

    def __init__(self, line: HeldLine, number: int, amounts: Amounts) -> None:
        self._line = line
        self._number = number
        self._amounts = {resource: amount for resource, amount in amounts.items() if amount}
        if self._amounts:
            line.add(number, self._amounts)

    def amount(self, resource: Resource) -> int:
        """Return the held amount of a resource."""
        return self._amounts.get(resource, 0)

    def add(self, amounts: Amounts) -> None:
        """Add amounts."""
        for resource, amount in amounts.items():
            self._amounts[resource] = self.amount(resource) + amount
        self._line.add(self._number, amounts)

    def keep(self, resource: Resource, amount: int = 0) -> None:
        """Reduce a resource to at most this amount."""
        less = self.amount(resource) - amount
        if less > 0:
            self._amounts[resource] = amount
            self._line.add(self._number, {resource: -less})

    def give_back(self, resource: Resource, amount: int) -> None:
        """Give back this much of a resource, at most what is held."""
        self.keep(resource, max(0, self.amount(resource) - amount))

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if held := {resource: -amount for resource, amount in self._amounts.items() if amount}:
            self._line.add(self._number, held)
        self._amounts = {}


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
