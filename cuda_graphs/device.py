"""The interface between the engine and the device that runs its launches.

Implementations: CUDA, host (a worker thread with a FIFO) and, in tests, simulated (work runs by a schedule). A
`Program` is what a launch computes; the device decides when and where it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import RingMemory
from runahead.cuda_graphs.shape import LaunchShape

NEVER: Final = 1 << 62  # a mark that no launch reaches


class DeviceError(RuntimeError):
    """A launch failed on the device. The engine stops; every request ends once."""


class Program(Protocol):
    """The three parts of a launch, which work in the device's memory.

    The device calls them in launch order: sample, apply, forward. A program counts launches itself: every `sample`
    advances its counter, which says which launch is running and which ring slot is its own. A captured graph could hold
    no number.
    """

    def sample(self, shape: LaunchShape) -> None:
        """S: advance the launch counter, and write a token for each sample row into the cells of the result slot."""

    def apply(self, shape: LaunchShape) -> int:
        """Apply the plan in its staging slot to the row state. Returns the bytes read from the rings
        (0 where only the device can know)."""

    def forward(self, shape: LaunchShape) -> None:
        """F: forward over the plan's rows; logits by row slot stay on the device."""

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        """The device's row state by field name, on the host. Only while nothing is in flight; good until the next
        launch."""


@dataclass(slots=True)
class DeviceCounters:
    """What a device did. Read by `Stats` and by tests."""

    bytes_to_device: int = 0
    waits: int = 0  # times the host blocked on a mark, and on nothing else
    graph_captures: int = 0
    graph_replays: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)  # launches that were not one graph, by reason


class Device(Protocol):
    """A FIFO of launches with two marks each: sampled (its tokens are readable) and ended (its F is done)."""

    rings: RingMemory
    counters: DeviceCounters
    buckets: tuple[int, ...]  # row counts that graphs are captured for, ascending; none where there are no graphs
    mixed_buckets: tuple[int, ...]  # query tokens of mixed launches that graphs are captured for, as above
    calls_at_once: int  # by which launches may be enqueued that have not ended; one more call might wait for the device

    def calls(self, shape: LaunchShape) -> int:
        """By how many calls a launch of this shape is enqueued, at most: a graph by one."""

    def launch(self, shape: LaunchShape) -> None:
        """Enqueue a launch whose plan is staged. Never blocks."""

    def sampled(self) -> int:
        """Number of the newest launch whose results are readable. Raises DeviceError if the device failed."""

    def ended(self) -> int:
        """Number of the newest launch whose F has ended, and which nothing on the device reads any more. Of a launch
        that runs in several places this is the least of their marks: everything is given back by it, and by nothing
        else. In one place it is never more than one launch behind `sampled`, if that is asked first.

        Raises DeviceError if the device failed.
        """

    def wait(self, sampled: int, ended: int, wake_fds: Sequence[int], timeout_s: float) -> None:
        """Block until `sampled()` > sampled, and the launch before that has ended, or `ended()` > ended, or a
        descriptor is readable, or time is up.

        The only place where the engine's thread blocks while launches are in flight.
        """

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        """`Program.read_rows`, once everything enqueued has ended."""

    def close(self) -> None:
        """Stop. Nothing enqueued is lost: it runs first, or has failed."""
