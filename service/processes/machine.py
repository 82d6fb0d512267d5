"""What the system says of processes and connections: Linux's /proc. Elsewhere nothing is known."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from runahead.service.shared_memory.process_table import ProcessFigures

_PROC: Final = Path("/proc")
_ZOMBIE: Final = "Z"
_ESTABLISHED: Final = "01"
_TABLES: Final = ("tcp", "tcp6")


class Orphans:
    """Children of this process that it has not started: where it is PID 1 of a container, orphans become its own."""

    def __init__(self) -> None:
        self._ended: set[int] = set()

    def reap(self, own: Iterable[int]) -> None:
        """To be called again and again. own: processes that somebody here waits for. A child that ends while it is
        started is not among them yet, but is waited for: so one is reaped that had ended at the last look already."""
        ended = set(_ended_children()).difference(own)
        for pid in ended & self._ended:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended


def _ended_children() -> Iterator[int]:
    """Those that nobody has reaped. None is reaped by this."""
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        folders = list(_PROC.glob("[0-9]*"))
    except OSError:  # there is no child at all, or no descriptor to look with
        return
    for folder in folders:
        with suppress(OSError):  # it has ended meanwhile
            # "number (name) state parent ...", where the name may have spaces and brackets.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state == _ZOMBIE and int(parent) == os.getpid():
                yield int(folder.name)


def processes(pids: Iterable[tuple[str, int]], proc: Path = _PROC) -> Iterator[ProcessFigures]:
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
