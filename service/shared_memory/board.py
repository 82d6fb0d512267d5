"""The figures of all front ends in shared memory: each writes its own line and all read.

The service's figures and limits are sums over the lines, counts of calls by method, status and duration too. A dead
front end's counts stay on its line, and its replacement continues from there. The supervisor writes each process's
resources once a second, so `Stats` reads them without asking; each process counts its dropped log lines itself.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from runahead.service.shared_memory.call_tables import CallLine, CallTable, HeldLine, HeldTable, Resource

_CELLS: Final = 4  # of a process: pid, memory, descriptors, dropped lines
_BESIDE: Final = ("supervisor", "engine", "side_server")  # processes besides front ends

# Reasons of refused calls that are counted. `runahead.service.contract.errors.STATUS_OF` has all reasons.
REFUSALS: Final = tuple(
    "INVALID_FIELD MALFORMED DUPLICATE_ID NO_MESSAGE SECOND_MESSAGE UPLOAD_TIMEOUT NO_CREDENTIALS UNKNOWN_CREDENTIALS "
    "NO_RIGHT NO_TOKENIZER NO_STRUCTURE NO_CHAT_TEMPLATE STRUCTURE_COST CHAT_COST STREAMS_LIMIT CALLER_STREAMS_LIMIT "
    "QUEUED_TOKENS_LIMIT CALLER_QUEUED_TOKENS_LIMIT TOKENIZING_LIMIT CALLER_TOKENIZING_LIMIT UPLOADS_LIMIT "
    "CALLER_UPLOADS_LIMIT QUEUE_FULL WATCHERS_LIMIT".split()
)

_PROC: Final = Path("/proc")
_ESTABLISHED: Final = "01"
_TABLES: Final = ("tcp", "tcp6")


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


def process_figures(pids: Iterable[tuple[str, int]], proc: Path = _PROC) -> Iterator[ProcessFigures]:
    """Yield figures of processes by name and number. Skips ended processes and other users'."""
    for name, pid in pids:
        folder = proc / str(pid)
        try:
            resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            with os.scandir(folder / "fd") as descriptors:
                yield ProcessFigures(name, pid, resident, sum(1 for _ in descriptors))
        except (OSError, IndexError):  # ended or ending
            continue


def open_connections(port: int, net: Path = Path("/proc/net")) -> int:
    """Count the TCP connections open to a port of this machine; 0 if the system does not say."""
    wanted, found = f":{port:04X} ".encode(), 0
    for table in _TABLES:
        try:
            lines = (net / table).read_bytes().splitlines()[1:]
        except OSError:
            continue
        # "  sl  local_address rem_address   st ...": number, local end, other end, state.
        for line in lines:
            if wanted in line[:56] and (fields := line.split(None, 4))[1].endswith(wanted.strip()):
                found += fields[3].decode() == _ESTABLISHED
    return found
