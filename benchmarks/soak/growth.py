"""What each process of a service takes of the machine over time, as Linux's /proc says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

MIB = 1 << 20
BLOCKS = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """A process's resources at one moment. at_s: seconds since the start. resident_bytes: its resident memory."""

    at_s: float
    resident_bytes: int
    threads: int
    descriptors: int


@dataclass(slots=True)
class Series:
    """One process, from its first sample to its last. name: as Stats calls it."""

    name: str
    pid: int
    samples: list[Sample] = field(default_factory=list)

    def since(self, at_s: float) -> list[Sample]:
        return [sample for sample in self.samples if sample.at_s >= at_s]


def sample_of(pid: int, at_s: float, proc: Path = Path("/proc")) -> Sample | None:
    """None where the process has ended."""
    folder = proc / str(pid)
    try:
        resident = int((folder / "statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        threads = len(list((folder / "task").iterdir()))
        return Sample(at_s, resident, threads, len(list((folder / "fd").iterdir())))
    except (OSError, IndexError):
        return None


@dataclass(frozen=True, slots=True)
class Growth:
    """MiB a minute. error: the standard error of the slope."""

    slope: float
    error: float

    def is_below(self, goal: float) -> bool:
        """False if the slope exceeds the goal by more than its error can explain: by two standard errors."""
        return self.slope - 2 * self.error < goal


def growth(samples: Sequence[Sample]) -> Growth | None:
    """The straight line that fits the memory best; None for less than two seconds.

    A process takes and returns memory in waves of several seconds, so samples beside each other are no independent
    measurements. The line fits the means of BLOCKS equal parts, whose distances from it give the error.
    """
    if len(samples) < BLOCKS or samples[-1].at_s - samples[0].at_s < 2.0:
        return None
    blocks = np.array_split(np.array([(sample.at_s / 60, sample.resident_bytes / MIB) for sample in samples]), BLOCKS)
    times, memory = np.array([block.mean(axis=0) for block in blocks]).T
    times, memory = times - times.mean(), memory - memory.mean()
    spread = float(times @ times)
    found = float(times @ memory) / spread
    distances = memory - found * times
    return Growth(found, float(np.sqrt(distances @ distances / (BLOCKS - 2) / spread)))


def of_session(leader: int, proc: Path = Path("/proc")) -> set[int]:
    """The processes, those included that have ended and that nobody has asked for, of the session of a process."""
    found = set()
    for folder in proc.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[3]) == leader:
            found.add(int(folder.name))
    return found
