"""How rank 0's process starts the other ranks of a model, on any device, and agrees with them on what they make."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Device
from runahead.cuda_graphs.rings import Allocate, RingLayout, RingMemory, zeros
from runahead.runtime.checkpoint import Checkpoint
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.process.rank_messages import RankOrders, digest
from runahead.runtime.process.rank_processes import RankProcesses
from runahead.runtime.ranks.exchange import ONE_RANK, Ranks
from runahead.runtime.ranks.ranked_device import RankedDevice
from runahead.runtime.ranks.segment import Segment, make_memory
from runahead.runtime.wire.engine_config import ConfigError

_ORDERED: Final = ("x86_64", "AMD64")  # processors on which stores are seen in their order
_LOOK_S: Final = 0.2  # between two looks whether a rank still runs, during the start


@dataclass(frozen=True, slots=True)
class OtherRanks:
    """The other ranks' processes, and the memory shared with them. memory: the segment's mapping in this process."""

    segment: Segment
    memory: memoryview
    processes: RankProcesses

    def close(self) -> None:
        """End the other ranks."""
        self.segment.abort()
        self.processes.close()


class StartedRanks:
    """What rank 0's process has beside its own part: nothing, where there is one rank alone.

    exchange: of rank 0. allocate: makes the memory of its results.
    """

    def __init__(
        self, exchange: Ranks = ONE_RANK, others: OtherRanks | None = None, allocate: Allocate = zeros
    ) -> None:
        self.exchange = exchange
        self._others, self._allocate = others, allocate
        self._started = threading.Event()
        if others is not None:
            threading.Thread(target=self._watch, args=(others,), name="ranks-watch", daemon=True).start()

    @property
    def marks(self) -> NDArray[np.int64] | None:
        """Rank 0's marks, [2]; None where there is one rank."""
        return None if self._others is None else self._others.segment.marks(0)

    def rings(self, layout: RingLayout, of_one: Callable[[RingLayout], RingMemory]) -> RingMemory:
        """Rank 0's rings. of_one: makes them where there is one rank."""
        return of_one(layout) if self._others is None else self._others.segment.rings(0, self._allocate)

    def loaded(self) -> None:
        """Wait until every rank has its weights. Raises ConfigError."""
        if self._others is not None:
            self._others.processes.loaded()

    def least(self, blocks: int, snapshots: int) -> int:
        """Return the number of KV blocks that every rank has room for, and let all ranks make them. blocks: for which
        rank 0 has room. snapshots: of states, which need room too. Raises ConfigError."""
        return blocks if self._others is None else self._others.processes.offer(blocks, snapshots)

    def device(self, own: Device, digest: str, launched: int) -> Device:
        """The engine's device, once every rank has its own. digest: as `Captured` has it. Raises ConfigError."""
        if self._others is None:
            return own
        self._others.processes.captured(digest)
        self._started.set()
        return RankedDevice(own, self._others.segment, self._others.processes, launched)

    def stop(self) -> None:
        """From now on no rank waits for another one, nor follows launches."""
        if self._others is not None:
            self._others.segment.abort()

    def close(self) -> None:
        """End the other ranks."""
        self._started.set()
        if self._others is not None:
            self._others.close()

    def _watch(self, others: OtherRanks) -> None:
        """During the start: where a rank has ended, this one no longer waits for it in an exchange."""
        while not self._started.wait(_LOOK_S):
            if others.processes.lost():
                others.segment.abort()
                return


def start_processes(orders: RankOrders, checkpoint: Checkpoint, model: ModelConfig) -> OtherRanks:
    """Make the segment and start the processes of the other ranks. orders: of all ranks, without what differs. Raises
    ConfigError where ranks can't run on this machine."""
    config, layout = orders.config, orders.layout
    setting = f"{config.spelling('tensor_parallel')} {layout.ranks}"
    if platform.machine() not in _ORDERED or not hasattr(os, "memfd_create"):
        raise ConfigError(f"{setting} needs Linux on an x86-64 processor, on which ranks see stores in their order")
    try:
        descriptor, memory = make_memory(layout)
    except OSError as error:
        raise ConfigError(f"{setting}: there is no memory for the ranks' segment: {error.strerror}") from error
    try:
        segment = Segment(layout, memory, config.counters_from)
        segment.begin()
        found = digest(checkpoint, model, layout, has_weights=config.load_format != "dummy")
        orders = msgspec.structs.replace(orders, descriptor=descriptor, digest=found)
        processes = RankProcesses([msgspec.structs.replace(orders, rank=rank) for rank in range(1, layout.ranks)])
    finally:
        os.close(descriptor)
    return OtherRanks(segment, memory, processes)
