"""The figures of all front ends, in memory that they share: a line for each, which it alone writes and all read.

So the figures of a service, and the limits that are its and not a front end's, are sums over the lines. What was
counted by a front end that died stays on its line, and the one that is started in its place goes on from there.
"""

from __future__ import annotations

import mmap
from dataclasses import astuple, dataclass, fields
from typing import Final

from runahead.service.process_table import ProcessTable


@dataclass(slots=True)
class FrontEndCounters:
    """What front ends saw, one or all of them. Its fields are those of `FrontEndStats`.

    front_ends: how many serve. answered_by: which of them answers, counted from 1; it is no figure, and never added up.
    unread_bytes: as of the last second.
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


_NAMES: Final = tuple(field.name for field in fields(FrontEndCounters))
# What a front end that has died has no more of.
_OF_THE_LIVING: Final = ("open_streams", "front_ends", "unread_bytes", "stats_watchers")
_BYTES: Final = 8


class Line(FrontEndCounters):
    """One front end's figures, each of which is on the board as soon as it is set."""

    __slots__ = ("_cells",)
    _cells: memoryview

    def __init__(self, cells: memoryview) -> None:
        object.__setattr__(self, "_cells", cells)
        super().__init__(*cells.tolist())

    def __setattr__(self, name: str, value: int) -> None:
        super().__setattr__(name, value)
        self._cells[_NAMES.index(name)] = value  # one aligned word


class Board:
    """lines: of front ends. memory: a file's descriptor, of `Board.size(lines)` bytes, which processes share; None is
    for one process alone."""

    def __init__(self, lines: int = 1, memory: int | None = None) -> None:
        size = self.size(lines)
        # The map keeps its file; with -1 it has none.
        self._words = memoryview(mmap.mmap(-1 if memory is None else memory, size)).cast("q")
        self._lines = lines
        self.processes = ProcessTable(self._words[lines * len(_NAMES) :], lines)

    @staticmethod
    def size(lines: int) -> int:
        """Bytes of so many lines, and of the table of processes behind them."""
        return (lines * len(_NAMES) + ProcessTable.size(lines)) * _BYTES

    def line(self, index: int) -> Line:
        """For the one front end that writes it."""
        return Line(self._cells(index))

    def clear(self, index: int) -> None:
        """The front end of this line has died: it serves nothing any more."""
        cells = self._cells(index)
        for name in _OF_THE_LIVING:
            cells[_NAMES.index(name)] = 0

    def total(self) -> FrontEndCounters:
        """The sums over all lines."""
        lines = (astuple(FrontEndCounters(*self._cells(index).tolist())) for index in range(self._lines))
        return FrontEndCounters(*map(sum, zip(*lines, strict=True)))

    def _cells(self, index: int) -> memoryview:
        return self._words[index * len(_NAMES) : (index + 1) * len(_NAMES)]
