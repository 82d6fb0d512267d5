"""The ranks of a model on CPUs, as rank 0's process starts them."""

from __future__ import annotations

import os
from typing import Final

from runahead.cuda_graphs.rings import RingLayout
from runahead.runtime.checkpoint import Checkpoint
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.cpu_check.cpu_kernels import KernelTrial
from runahead.runtime.process.rank_messages import RankOrders
from runahead.runtime.process.rank_start import StartedRanks, start_processes
from runahead.runtime.ranks.exchange import HostRanks
from runahead.runtime.ranks.segment import SegmentLayout
from runahead.runtime.wire.engine_config import EngineConfig

_LEAST_NUMBERS: Final = 1 << 18  # of a step of an exchange: 1 MiB a rank


def start_ranks(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, context: int, rings: RingLayout,
    trial: KernelTrial,
) -> StartedRanks:  # fmt: skip
    """Start the other ranks, which load their parts meanwhile. config: with every size in it. trial: of rank 0's
    kernels. Raises ConfigError where ranks can't run on this machine."""
    ranks = config.tensor_parallel
    if ranks == 1:
        return StartedRanks()
    layout = SegmentLayout(ranks, rings, max(_LEAST_NUMBERS, model.vocab_size // ranks))
    orders = RankOrders(
        layout=layout, config=config, context=context, parent=os.getpid(), threads=trial.threads,
        products=trial.products,
    )  # fmt: skip
    others = start_processes(orders, checkpoint, model)
    return StartedRanks(HostRanks(others.segment, 0, config.launch_timeout_s), others)
