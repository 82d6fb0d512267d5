"""The figures of all front ends, in memory that they share: a line for each, which it alone writes and all read.

So the figures of a service, and the limits that are its and not a front end's, are sums over the lines. What was
counted by a front end that died stays on its line, and the one that is started in its place goes on from there.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, fields
from typing import Final

from runahead.service.shared_memory.call_table import CallLine, CallTable
from runahead.service.shared_memory.held import HeldLine, HeldTable, Resource
from runahead.service.shared_memory.process_table import ProcessTable

# Of errors that refuse a call, which are counted by these names. `runahead.service.contract.errors.STATUS_OF` has all
# errors.
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


@dataclass(slots=True)
class FrontEndCounters:
    """What front ends saw, one or all of them. Its fields are those of `FrontEndStats`.

    open_streams: what is held of `Resource.STREAMS`. front_ends: how many serve. answered_by: which of them answers,
    counted from 1; it is no figure, and never added up.
    unread_bytes, waiting_texts, waiting_structures: as of the last second.
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
)  # what one that has died has no more of
_BEATS: Final = len(_NAMES) + len(REFUSALS)  # the cell behind them
_WORDS: Final = _BEATS + 1
_BYTES: Final = 8


class Line(FrontEndCounters):
    """One front end's figures, each of which is on the board as soon as it is set.

    held: what its calls hold. calls: how they have ended.
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
        self._cells[_NAMES.index(name)] = value  # one aligned word

    def beat(self) -> None:
        """Its event loop turns."""
        self._cells[_BEATS] += 1

    def refuse(self, reason: str) -> None:
        """Counts a call that ends for a reason, if that is one of `REFUSALS`."""
        if reason in REFUSALS:
            self._cells[len(_NAMES) + REFUSALS.index(reason)] += 1


class Board:
    """lines: of front ends. memory: a file's descriptor, of `Board.size(lines)` bytes, which processes share; None is
    for one process alone."""

    def __init__(self, lines: int = 1, memory: int | None = None) -> None:
        # The map keeps its file; with -1 it has none.
        shared = memoryview(mmap.mmap(-1 if memory is None else memory, self.size(lines)))
        tables = self.size(lines) - HeldTable.size(lines)
        self._words = shared[:tables].cast("q")
        self._lines = lines
        self.processes = ProcessTable(self._words[lines * _WORDS :], lines)
        self.calls = CallTable(self._words[lines * _WORDS + ProcessTable.size(lines) :], lines)
        self.held = HeldTable(lines, shared[tables:])

    @staticmethod
    def size(lines: int) -> int:
        """Bytes of so many lines, and of the tables behind them."""
        words = lines * _WORDS + ProcessTable.size(lines) + CallTable.size(lines)
        return words * _BYTES + HeldTable.size(lines)

    def line(self, index: int, apart: HeldTable | None = None) -> Line:
        """For the one front end that writes it. Nothing is held there any more, whoever had it before.

        apart: of one line, for what is held there in place of the board's own table: it counts for none of its limits.
        """
        held = self.held.line(index) if apart is None else apart.line(0)
        return Line(self._cells(index), held, self.calls.line(index))

    def clear(self, index: int) -> None:
        """The front end of this line has died: it serves nothing any more, and what it served has ended."""
        self.held.clear(index)
        self.calls.line(index).end_open()
        cells = self._cells(index)
        for name in _OF_THE_LIVING:
            cells[_NAMES.index(name)] = 0

    def dropped_lines_place(self, name: str) -> int:
        """The number of the 64-bit word in the shared memory where the process of this name counts the lines that its
        log dropped."""
        return self._lines * _WORDS + self.processes.dropped_lines_place(name)

    def total(self) -> FrontEndCounters:
        """The sums over all lines."""
        lines = [self._cells(index)[: len(_NAMES)].tolist() for index in range(self._lines)]
        open_streams = int(self.held.in_all()[Resource.STREAMS])
        return FrontEndCounters(open_streams, *map(sum, zip(*lines, strict=True)))

    def serving(self) -> dict[int, int]:
        """How often each front end that serves has said that its event loop turns, by its line."""
        place = _NAMES.index("front_ends")
        lines = ((index, self._cells(index)) for index in range(self._lines))
        return {index: cells[_BEATS] for index, cells in lines if cells[place]}

    def refusals(self) -> dict[str, int]:
        """Calls that were refused, by reason: those of `REFUSALS` that there were."""
        lines = [self._cells(index)[len(_NAMES) : _BEATS].tolist() for index in range(self._lines)]
        counts = map(sum, zip(*lines, strict=True))
        return {reason: count for reason, count in zip(REFUSALS, counts, strict=True) if count}

    def _cells(self, index: int) -> memoryview:
        return self._words[index * _WORDS : (index + 1) * _WORDS]
