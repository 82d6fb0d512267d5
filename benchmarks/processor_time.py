"""Processor time that the parts of a local service have taken: how busy the machine is otherwise changes it little.

Linux counts it of each thread, in ns; a kernel that stands in for it may know of ticks alone, some 10 ms each. The
engine's first thread is its loop; the others are its device on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.local_service import LocalService
from runahead.runtime.masks.mask_worker import WORKER_MODULE
from runahead.service.processes.engine_process import ENGINE_MODULE
from runahead.service.processes.front_end_process import FRONT_END_MODULE

LOOP: Final = "loop"
DEVICE: Final = "device"
MASKS: Final = "mask worker"
FRONT_END: Final = "front end"
PARTS: Final = (LOOP, DEVICE, MASKS, FRONT_END)
_OF_PROCESSES: Final = {WORKER_MODULE: MASKS, FRONT_END_MODULE: FRONT_END}


def seconds_by_part(service: LocalService) -> dict[str, float]:
    """Since its start, of each of PARTS; 0 where its process is not there."""
    found = dict.fromkeys(PARTS, 0.0)
    for process in _processes(service.process.pid):
        words = (process / "cmdline").read_bytes().decode().split("\0")
        if ENGINE_MODULE in words:
            for thread in (process / "task").iterdir():
                found[LOOP if thread.name == process.name else DEVICE] += _seconds(thread)
        for module, part in _OF_PROCESSES.items():
            if module in words:
                found[part] += sum(map(_seconds, (process / "task").iterdir()))
    return found


def _processes(session: int) -> Iterator[Path]:
    """Those of a session that are there while they are looked at."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            yield process


def _seconds(thread: Path) -> float:
    try:
        return int((thread / "schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        fields = (thread / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # of the user's code, and of the kernel's
