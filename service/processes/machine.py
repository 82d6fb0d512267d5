"""What the system says of processes and connections: Linux's /proc. Elsewhere nothing is known."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from runahead.service.shared_memory.process_table import ProcessFigures

_ESTABLISHED: Final = "01"
_TABLES: Final = ("tcp", "tcp6")


def processes(pids: Iterable[tuple[str, int]], proc: Path = Path("/proc")) -> Iterator[ProcessFigures]:
    """Figures of processes by name and number, without those that have ended, or are not this user's."""
    for name, pid in pids:
        folder = proc / str(pid)
        try:
            resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            with os.scandir(folder / "fd") as descriptors:
                yield ProcessFigures(name, pid, resident, sum(1 for _ in descriptors))
        except (OSError, IndexError):  # it has ended, or is about to
            continue


def connections(port: int, net: Path = Path("/proc/net")) -> int:
    """TCP connections open to a port of this machine, on whatever address. 0 where the system does not say."""
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
