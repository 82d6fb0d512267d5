"""How rank 0's process makes the segment and starts the processes of the other ranks, on any device."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from runahead.runtime.checkpoint import Checkpoint
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.process.rank_messages import RankOrders, digest
from runahead.runtime.process.rank_processes import RankProcesses
from runahead.runtime.ranks.segment import Segment, SegmentLayout, make_memory
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig

_ORDERED: Final = ("x86_64", "AMD64")  # processors on which stores are seen in their order


@dataclass(frozen=True, slots=True)
class Started:
    """memory: the segment's, as this process maps it."""

    segment: Segment
    memory: memoryview
    processes: RankProcesses


def start_processes(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: ModelConfig,
    layout: SegmentLayout,
    orders_of: Callable[[int, int, dict[str, str]], RankOrders],
    begin: Callable[[list[RankOrders]], RankProcesses] = RankProcesses,
) -> Started:
    """orders_of: the orders of a rank, from its number, the segment's descriptor and rank 0's digest. Raises
    ConfigError where ranks can't run on this machine."""
    setting = f"{config.spelling('tensor_parallel')} {config.tensor_parallel}"
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
        processes = begin([orders_of(rank, descriptor, found) for rank in range(1, config.tensor_parallel)])
    finally:
        os.close(descriptor)
    return Started(segment, memory, processes)
