"""The ranks of a model on GPUs, as rank 0's process has them: rank r has a process, and GPU r
unless a test says otherwise.

`runahead.runtime.process.cuda_follow` is the process of another rank.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.cuda_graphs.cuda_device import CudaDevice, pinned
from runahead.cuda_graphs.device import Device
from runahead.cuda_graphs.rings import RingLayout, RingMemory
from runahead.runtime.checkpoint import Checkpoint
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.process.rank_messages import BlocksOffered, RankOrders
from runahead.runtime.process.rank_processes import RankProcesses
from runahead.runtime.process.rank_start import start_processes
from runahead.runtime.ranks.exchange import ONE_RANK, Ranks
from runahead.runtime.ranks.gpu_ranks import MOST_WIDTH, GpuRanks, Mailbox, make_counters
from runahead.runtime.ranks.peer_memory import CudaRuntime, PeerMemoryError, why_not_together
from runahead.runtime.ranks.ranked_device import RankedDevice
from runahead.runtime.ranks.segment import ABORT, FAULT, FAULT_PEER, WAITED, Segment, SegmentLayout
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig

_LOOK_S: Final = 0.2  # between two looks whether a rank still runs, during the start


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank of several, once its GPU can reach its peers'."""

    rank: int
    segment: Segment
    exchange: GpuRanks

    def rings(self) -> RingMemory:
        return self.segment.rings(self.rank, pinned)

    def marks(self) -> NDArray[np.int64]:
        return self.segment.marks(self.rank)

    def digest(self, device: CudaDevice) -> str:
        """Of what all ranks must have captured alike."""
        keys = repr(device.graph_buckets.every_key())
        return sha256(f"{keys} {self.exchange.digest}".encode()).hexdigest()


def joined(rank: int, segment: Segment, memory: memoryview, handles_of: Callable[[str], tuple[str, ...]]) -> Joined:
    """Make the rank's mailbox and open its peers'. memory: the segment's, which the current GPU then reaches.
    handles_of: given the rank's own handle, returns those of all. Raises PeerMemoryError."""
    runtime = CudaRuntime()
    runtime.register(memory)
    mailbox = Mailbox(rank, segment.layout.ranks, runtime)
    handles = handles_of(mailbox.handle.hex())
    boxes = mailbox.joined([bytes.fromhex(handle) for handle in handles])
    own, device = segment.views.words[rank], torch.device("cuda", torch.cuda.current_device())
    stop = segment.views.host[ABORT : ABORT + 1]
    counters = make_counters(device, stop, own[FAULT : FAULT_PEER + 1], own[WAITED : WAITED + 1])
    return Joined(rank, segment, GpuRanks(mailbox.share, boxes, counters))


class CudaRanks:
    """What rank 0's process has beside its own part: nothing, where there is one rank alone."""

    def __init__(self, own: Joined | None = None, followers: RankProcesses | None = None) -> None:
        self._own, self._followers = own, followers
        self._started = threading.Event()
        if followers is not None:
            threading.Thread(target=self._watch, name="ranks-watch", daemon=True).start()

    @property
    def exchange(self) -> Ranks:
        return ONE_RANK if self._own is None else self._own.exchange

    @property
    def marks(self) -> NDArray[np.int64] | None:
        return None if self._own is None else self._own.marks()

    def rings(self, layout: RingLayout, of_one: Callable[[RingLayout], RingMemory]) -> RingMemory:
        """Rank 0's rings. of_one: makes them where there is one rank."""
        return of_one(layout) if self._own is None else self._own.rings()

    def loaded(self) -> None:
        """Wait until every rank has its weights. Raises ConfigError."""
        if self._followers is not None:
            self._followers.loaded()

    def least(self, blocks: int, snapshots: int) -> int:
        """KV blocks that every rank has room for beside so many snapshots of states, which all of them make now.
        blocks: as rank 0 has found. Raises ConfigError."""
        if self._followers is None:
            return blocks
        self._followers.say(BlocksOffered(blocks, snapshots=snapshots))
        least = self._followers.least_offered(blocks)
        self._followers.say(BlocksOffered(least, final=True))
        return least

    def device(self, own: CudaDevice, config: EngineConfig) -> Device:
        """The engine's device, once every rank has its graphs. Raises ConfigError."""
        if self._own is None or self._followers is None:
            return own
        self._followers.captured(self._own.digest(own))
        self._own.exchange.limit(config.launch_timeout_s)
        torch.cuda.synchronize()
        self._started.set()
        return RankedDevice(own, self._own.segment, self._followers, config.counters_from)

    def stop(self) -> None:
        """From now on no GPU waits for another one, and no rank follows launches."""
        if self._own is not None:
            self._own.segment.abort()

    def close(self) -> None:
        """End the other ranks."""
        self._started.set()
        self.stop()
        if self._followers is not None:
            self._followers.close()

    def _watch(self) -> None:
        """During the start: where a rank has ended, this one's GPU no longer waits for it."""
        assert self._followers is not None and self._own is not None
        while not self._started.wait(_LOOK_S):
            if self._followers.lost():
                self._own.segment.abort()
                return


def start_ranks(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: ModelConfig,
    context: int,
    rings: RingLayout,
    forced: int | None,
    gpus: Sequence[int] = (),
) -> CudaRanks:
    """Start the other ranks, and let all GPUs reach each other. config: with every size in it. forced: as
    `RankOrders.forced`. gpus: as `make_on_cuda`. Raises ConfigError where these GPUs can't be ranks of one model."""
    ranks = config.tensor_parallel
    if ranks == 1:
        return CudaRanks()
    setting = f"{config.spelling('tensor_parallel')} {ranks}"
    if model.hidden_size > MOST_WIDTH:
        raise ConfigError(f"{setting} is for hidden states of up to {MOST_WIDTH:,} numbers, not {model.hidden_size:,}")
    gpus = gpus or range(ranks)
    if why := why_not_together(gpus):
        raise ConfigError(f"{setting} can't be served here: {why}")
    layout = SegmentLayout(ranks, rings, 1)

    def orders_of(rank: int, descriptor: int, found: dict[str, str]) -> RankOrders:
        return RankOrders(
            rank=rank, descriptor=descriptor, layout=layout, config=config, context=context, products="", threads=1,
            snapshots=0, digest=found, parent=os.getpid(), forced=forced, gpu=gpus[rank],
        )  # fmt: skip

    started = start_processes(config, checkpoint, model, layout, orders_of)
    try:
        own = joined(0, started.segment, started.memory, started.processes.mailboxes)
    except BaseException as error:
        with suppress(OSError):
            started.processes.close()
        if isinstance(error, PeerMemoryError):
            raise ConfigError(f"{setting} can't be served here: {error}") from error
        raise
    return CudaRanks(own, started.processes)
