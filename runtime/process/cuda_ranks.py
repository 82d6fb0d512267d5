"""The ranks of a model on GPUs: rank r has a process, and GPU r unless a test says otherwise.

`runahead.runtime.process.cuda_follow` is another rank than the first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hashlib import sha256

import torch

from runahead.cuda_graphs.cuda_device import CudaDevice, pinned
from runahead.cuda_graphs.rings import RingLayout
from runahead.runtime.checkpoint import Checkpoint
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.process.rank_start import RankOrders, StartedRanks, start_processes
from runahead.runtime.ranks.exchange import Ranks
from runahead.runtime.ranks.gpu_ranks import MOST_WIDTH, GpuRanks, Mailbox, make_counters
from runahead.runtime.ranks.peer_memory import CudaRuntime, PeerMemoryError, why_not_together
from runahead.runtime.ranks.segment import ABORT, FAULT, FAULT_PEER, WAITED, Segment, SegmentLayout
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig


def joined(rank: int, segment: Segment, memory: memoryview, handles_of: Callable[[str], tuple[str, ...]]) -> GpuRanks:
    """Make the rank's mailbox and open its peers'. memory: the segment's, which the current GPU then reaches.
    handles_of: given the rank's own handle, returns the handles of all. Raises PeerMemoryError."""
    runtime = CudaRuntime()
    runtime.register(memory)
    mailbox = Mailbox(rank, segment.layout.ranks, runtime)
    handles = handles_of(mailbox.handle.hex())
    boxes = mailbox.joined([bytes.fromhex(handle) for handle in handles])
    own, device = segment.views.words[rank], torch.device("cuda", torch.cuda.current_device())
    stop = segment.views.host[ABORT : ABORT + 1]
    counters = make_counters(device, stop, own[FAULT : FAULT_PEER + 1], own[WAITED : WAITED + 1])
    return GpuRanks(mailbox.shard, boxes, counters)


def captured(device: CudaDevice, exchange: Ranks, limit_s: float) -> str:
    """A digest of what all ranks must have captured alike; empty where there is one rank. From now on, no wait for a
    peer is longer than limit_s seconds."""
    if not isinstance(exchange, GpuRanks):
        return ""
    torch.cuda.synchronize()
    exchange.limit(limit_s)
    torch.cuda.synchronize()
    return sha256(f"{device.graph_buckets.every_key()!r} {exchange.digest}".encode()).hexdigest()


def start_ranks(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: ModelConfig,
    context: int,
    rings: RingLayout,
    forced: int | None,
    gpus: Sequence[int] = (),
) -> StartedRanks:
    """Start the other ranks, and let all GPUs reach each other. config: with every size in it. forced: as
    `RankOrders.forced`. gpus: as `make_on_cuda`. Raises ConfigError where these GPUs can't be ranks of one model."""
    ranks = config.tensor_parallel
    if ranks == 1:
        return StartedRanks()
    setting = f"{config.spelling('tensor_parallel')} {ranks}"
    if model.hidden_size > MOST_WIDTH:
        raise ConfigError(f"{setting} is for hidden states of up to {MOST_WIDTH:,} numbers, not {model.hidden_size:,}")
    gpus = tuple(gpus or range(ranks))
    if why := why_not_together(gpus):
        raise ConfigError(f"{setting} can't be served here: {why}")
    orders = RankOrders(
        layout=SegmentLayout(ranks, rings, 1), config=config, context=context, parent=os.getpid(), gpus=gpus,
        forced=forced,
    )  # fmt: skip
    others = start_processes(orders)
    try:
        own = joined(0, others.segment, others.memory, others.processes.mailboxes)
    except BaseException as error:
        others.close()
        if isinstance(error, PeerMemoryError):
            raise ConfigError(f"{setting} can't be served here: {error}") from error
        raise
    return StartedRanks(own, others, pinned)
