"""What each process of the service takes of the machine, in the shared memory that all can read.

The supervisor alone writes it, once a second: it knows every process. So whoever answers `Stats` asks nobody. The
count of lines that its log dropped each process writes itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_CELLS: Final = 4  # of a process: its number, memory, descriptors, dropped lines
_BESIDE: Final = ("supervisor", "engine", "side_server")  # of front ends there are as many as are started


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """name: what it is. pid: its number in the system. resident_bytes: memory that it holds. log_lines_dropped: by it
    and those before it of its name; `ProcessTable.write` passes it over."""

    name: str
    pid: int
    resident_bytes: int
    descriptors: int
    log_lines_dropped: int = 0


class ProcessTable:
    """cells: int64, `ProcessTable.size(front_ends)` of them. front_ends: how many there may be."""

    def __init__(self, cells: memoryview, front_ends: int) -> None:
        self._cells = cells
        self.names = (*_BESIDE, *(f"front_end_{number}" for number in range(1, front_ends + 1)))

    @staticmethod
    def size(front_ends: int) -> int:
        """Cells of so many front ends' service."""
        return 1 + _CELLS * (len(_BESIDE) + front_ends)

    @property
    def connections(self) -> int:
        """That are open on the service's port."""
        return int(self._cells[0])

    def write(self, processes: Iterator[ProcessFigures], connections: int) -> None:
        """What is there now: one that is not among them has ended."""
        self._cells[0] = connections
        found = {process.name: process for process in processes}
        for place, name in enumerate(self.names):
            begin, process = 1 + place * _CELLS, found.get(name)
            self._cells[begin] = 0 if process is None else process.pid
            if process is not None:
                self._cells[begin + 1] = process.resident_bytes
                self._cells[begin + 2] = process.descriptors

    def dropped_lines(self, name: str) -> memoryview:
        """Where the process of this name counts the lines that its log dropped: int64 [1]."""
        place = self.dropped_lines_place(name)
        return self._cells[place : place + 1]

    def dropped_lines_place(self, name: str) -> int:
        """The number of that cell."""
        return _CELLS * (1 + self.names.index(name))

    def read(self) -> tuple[ProcessFigures, ...]:
        """Of the processes that are there."""
        cells = self._cells[1 : 1 + _CELLS * len(self.names)].tolist()
        found = (ProcessFigures(name, *cells[place * _CELLS :][:_CELLS]) for place, name in enumerate(self.names))
        return tuple(process for process in found if process.pid)
