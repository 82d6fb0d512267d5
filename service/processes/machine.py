"""Reads processes and connections from Linux's /proc. Other systems give no figures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from runahead.service.shared_memory.board import ProcessFigures

_PROC: Final = Path("/proc")
_ZOMBIE: Final = "Z"
_ESTABLISHED: Final = "01"
_TABLES: Final = ("tcp", "tcp6")


class Orphans:
    """Children that this process did not start: as PID 1 of a container it inherits orphans."""

    def __init__(self) -> None:
        self._ended: set[int] = set()

    def reap(self, own: Iterable[int]) -> None:
        """Reap orphans; call it regularly. own: processes that are waited for. A child that ends while it starts is not
        among them yet, so only those are reaped that had ended at the previous call too.
        """
        ended = set(_ended_children()).difference(own)
        for pid in ended & self._ended:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended


def _ended_children() -> Iterator[int]:
    """Yield ended children without reaping them."""
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        folders = list(_PROC.glob("[0-9]*"))
    except OSError:  # no children, or no descriptor
        return
    for folder in folders:
        with suppress(OSError):  # it was reaped meanwhile
            # "number (name) state parent ...", where the name may have spaces and parentheses.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state == _ZOMBIE and int(parent) == os.getpid():
                yield int(folder.name)


def processes(pids: Iterable[tuple[str, int]], proc: Path = _PROC) -> Iterator[ProcessFigures]:
    """Yield figures of processes by name and number. Skips ended processes and other users'."""
    for name, pid in pids:
        folder = proc / str(pid)
        try:
            resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            with os.scandir(folder / "fd") as descriptors:
                yield ProcessFigures(name, pid, resident, sum(1 for _ in descriptors))
        except (OSError, IndexError):  # ended or ending
            continue


def connections(port: int, net: Path = Path("/proc/net")) -> int:
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
