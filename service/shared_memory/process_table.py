"""Each process's resources in shared memory.

The supervisor writes it once a second, so `Stats` reads it without asking. Each process counts its dropped log lines
itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_CELLS: Final = 4  # of a process: pid, memory, descriptors, dropped lines
_BESIDE: Final = ("supervisor", "engine", "side_server")  # processes besides front ends


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
