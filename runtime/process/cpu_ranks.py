"""The ranks of a model on CPUs, as rank 0's process makes them, and as the processes of the others follow it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch

from runahead.cuda_graphs.device import Device
from runahead.cuda_graphs.host_device import HostDevice
from runahead.cuda_graphs.rings import RingLayout, RingMemory, allocate_rings
from runahead.runtime.checkpoint import Checkpoint, open_checkpoint
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.cpu_check.cpu_kernels import KernelTrial, kernels_of
from runahead.runtime.models.load import load_model
from runahead.runtime.models.read_config import load_config
from runahead.runtime.process.parts import dtype_of
from runahead.runtime.process.rank_messages import RankOrders, digest, what_differs
from runahead.runtime.process.rank_processes import RankProcesses
from runahead.runtime.process.rank_start import start_processes
from runahead.runtime.programs.cpu.program import HostProgram
from runahead.runtime.ranks.exchange import ONE_RANK, HostRanks, Ranks
from runahead.runtime.ranks.ranked_device import Followers, RankedDevice
from runahead.runtime.ranks.segment import Segment, SegmentLayout
from runahead.runtime.wire.engine_config import EngineConfig

_LEAST_NUMBERS: Final = 1 << 18  # of a step of an exchange: 1 MiB a rank

ProgramWith = Callable[[int], HostProgram]  # so many KV blocks


class StartedRanks(Followers, Protocol):
    """`RankProcesses`, or what stands in for them."""

    def loaded(self) -> None: ...

    def offer(self, blocks: int) -> int: ...


@dataclass(frozen=True, slots=True)
class CpuRanks:
    """What rank 0's process has beside its own part. segment, followers: None where there is one rank alone."""

    exchange: Ranks = ONE_RANK
    segment: Segment | None = None
    followers: StartedRanks | None = None

    def rings(self, layout: RingLayout) -> RingMemory:
        """Rank 0's rings."""
        return allocate_rings(layout) if self.segment is None else self.segment.rings(0)

    def agreed(self, program: HostProgram, blocks: int, program_with: ProgramWith) -> tuple[HostProgram, int]:
        """Rank 0's program, with as many KV blocks as every rank has memory for, and their number. Raises
        ConfigError."""
        if self.followers is None:
            return program, blocks
        self.followers.loaded()
        least = self.followers.offer(blocks)
        return (program, blocks) if least == blocks else (program_with(least), least)

    def device(
        self, program: HostProgram, rings: RingMemory, delay: Callable[[], None], launched: int
    ) -> HostDevice | RankedDevice:
        """The engine's device."""
        if self.segment is None or self.followers is None:
            return HostDevice(program, rings, delay, launched=launched)
        own = HostDevice(program, rings, delay, launched=launched, marks=self.segment.marks(0))
        return RankedDevice(own, self.segment, self.followers, launched)

    def close(self) -> None:
        """End the other ranks."""
        if self.segment is not None and self.followers is not None:
            self.segment.abort()
            self.followers.close()


def start_ranks(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: ModelConfig,
    context: int,
    rings: RingLayout,
    trial: KernelTrial,
    snapshots: int,
) -> CpuRanks:
    """Start the other ranks, which load their parts meanwhile. config: with every size in it. trial: of rank 0's
    kernels. Raises ConfigError where ranks can't run on this machine."""
    ranks = config.tensor_parallel
    if ranks == 1:
        return CpuRanks()
    layout = SegmentLayout(ranks, rings, max(_LEAST_NUMBERS, model.vocab_size // ranks))

    def orders_of(rank: int, descriptor: int, found: dict[str, str]) -> RankOrders:
        return RankOrders(
            rank=rank, descriptor=descriptor, layout=layout, config=config, context=context, products=trial.products,
            threads=trial.threads, snapshots=snapshots, digest=found, parent=os.getpid(),
        )  # fmt: skip

    started = start_processes(config, checkpoint, model, layout, orders_of, RankProcesses)
    exchange = HostRanks(started.segment, 0, config.launch_timeout_s)
    return CpuRanks(exchange, started.segment, started.processes)


@dataclass(frozen=True, slots=True)
class RankParts:
    """A rank other than the first, with its weights. differs: what it has found other than rank 0; see
    `RankLoaded.differs`. program_with: makes its program."""

    segment: Segment
    differs: str
    program_with: ProgramWith
    rings: RingMemory

    def device(self, orders: RankOrders, program: HostProgram, delay: Callable[[], None]) -> Device:
        launched = orders.config.counters_from
        return HostDevice(program, self.rings, delay, launched=launched, marks=self.segment.marks(orders.rank))


def load_rank(orders: RankOrders, memory: memoryview, build: Callable[..., HostProgram]) -> RankParts:
    """Load the rank's part of the model. memory: the segment's. build: `runahead.runtime.process.cpu.host_program`.

    Raises ConfigError, CheckpointError.
    """
    config, context = orders.config, orders.context
    segment = Segment(orders.layout, memory, config.counters_from)
    checkpoint = open_checkpoint(Path(config.model))
    described = load_config(checkpoint)
    found = digest(checkpoint, described, orders.layout, has_weights=config.load_format != "dummy")
    model = load_model(
        checkpoint, torch.device("cpu"), dtype_of(config, described), config.load_format, kernels_of(orders.products),
        None, context, described, HostRanks(segment, orders.rank, config.launch_timeout_s),
        config.quantize, config.kv_dtype,
    )  # fmt: skip
    rings = segment.rings(orders.rank)

    def program_with(blocks: int) -> HostProgram:
        return build(config, model, rings, context, blocks, orders.snapshots, None, None)

    return RankParts(segment, what_differs(found, orders.digest), program_with, rings)
