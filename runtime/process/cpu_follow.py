"""A rank other than the first on a CPU."""

from __future__ import annotations

from typing import Final

import torch

from runahead.cuda_graphs.host_device import HostDevice
from runahead.runtime.checkpoint import Checkpoint
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.cpu_check.cpu_kernels import kernels_of
from runahead.runtime.models.load import load_model
from runahead.runtime.process.cpu import delays, has_jitter, host_program
from runahead.runtime.process.parts import dtype_of
from runahead.runtime.process.pool_fit import is_out_of_memory
from runahead.runtime.process.rank_messages import BlocksOffered, RankOrders
from runahead.runtime.programs.cpu.program import HostProgram
from runahead.runtime.ranks.exchange import HostRanks
from runahead.runtime.ranks.segment import Segment

_SMALLER: Final = (9, 10)  # the pool that a rank makes over the one that it has no memory for


class CpuRank:
    """A `RankPart` on a CPU. Its program is made to find out how many KV blocks there is memory for."""

    def __init__(self, orders: RankOrders, segment: Segment) -> None:
        self._exchange = HostRanks(segment, orders.rank, orders.config.launch_timeout_s)
        self._orders = orders
        self._rings, self._marks = segment.rings(orders.rank), segment.marks(orders.rank)

    def load(self, checkpoint: Checkpoint, described: ModelConfig) -> None:
        """See `RankPart.load`."""
        config, context = self._orders.config, self._orders.context
        kernels, dtype = kernels_of(self._orders.products), dtype_of(config, described)
        self._model = load_model(
            checkpoint, torch.device("cpu"), dtype, config.load_format, kernels, None, context, described,
            self._exchange, config.quantize, config.kv_dtype,
        )  # fmt: skip

    def begin(self) -> None:
        """See `RankPart.begin`."""

    def blocks(self, offered: BlocksOffered) -> int:
        """See `RankPart.blocks`."""
        self._blocks = offered.blocks
        while True:
            try:
                self._program = self._program_with(offered)
                return self._blocks
            except Exception as error:
                if not is_out_of_memory(error) or self._blocks < 2:
                    raise
            given, part = _SMALLER
            self._blocks = self._blocks * given // part

    def device(self, agreed: BlocksOffered) -> tuple[HostDevice, str]:
        """See `RankPart.device`."""
        if self._blocks != agreed.blocks:
            self._blocks = agreed.blocks
            self._program = self._program_with(agreed)
        config = self._orders.config
        device = HostDevice(
            self._program,
            self._rings,
            delays(config, self._orders.rank),
            launched=config.counters_from,
            marks=self._marks,
            late_tail=has_jitter(config),
        )
        return device, ""

    def _program_with(self, offered: BlocksOffered) -> HostProgram:
        config, context = self._orders.config, self._orders.context
        return host_program(config, self._model, self._rings, context, self._blocks, offered.snapshots, None, None)
