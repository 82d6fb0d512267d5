"""A rank other than the first on its GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from runahead.cuda_graphs.cuda_device import CudaDevice, free_bytes, pinned
from runahead.runtime.checkpoint import Checkpoint
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.load import load_model
from runahead.runtime.process.cuda import Maker
from runahead.runtime.process.cuda_ranks import captured, joined
from runahead.runtime.process.parts import blocks_in, bytes_kept, dtype_of, snapshots_in
from runahead.runtime.process.pool_fit import overhead
from runahead.runtime.process.rank_start import BlocksOffered, RankOrders
from runahead.runtime.programs.cuda.program import gpu_kernels, keep_kernels, use_tuned
from runahead.runtime.ranks.segment import Segment


class CudaRank:
    """A `RankPart` on a GPU: it starts as rank 0 does, and captures the same graphs. memory: the segment's. handles_of:
    as `joined` has it. Raises PeerMemoryError."""

    def __init__(
        self, orders: RankOrders, segment: Segment, memory: memoryview, handles_of: Callable[[str], tuple[str, ...]]
    ) -> None:
        config, gpu = orders.config, orders.gpus[orders.rank]
        torch.cuda.set_device(gpu)
        keep_kernels(config.kernel_cache, config.spelling("kernel_cache"))
        use_tuned()
        self._exchange = joined(orders.rank, segment, memory, handles_of)
        self._orders, self._segment = orders, segment

    def load(self, checkpoint: Checkpoint, described: ModelConfig) -> None:
        """See `RankPart.load`."""
        config, context = self._orders.config, self._orders.context
        device, dtype = torch.device("cuda", torch.cuda.current_device()), dtype_of(config, described)
        self._model = load_model(
            checkpoint, device, dtype, config.load_format, gpu_kernels(), None, context, described, self._exchange,
            config.quantize, config.kv_dtype,
        )  # fmt: skip

    def begin(self) -> None:
        """See `RankPart.begin`: the largest launches, of which all ranks exchange results."""
        orders, config, context, model = self._orders, self._orders.config, self._orders.context, self._model
        # Only rank 0 reads masks. Here their memory only says how many drafts grammars may force.
        masks = None if orders.forced is None else MaskMemory(config.max_rows, model.config.vocab_size, orders.forced)
        kept, spare = bytes_kept(config, model.config, model.dtype), overhead(torch.cuda.mem_get_info()[1])
        snapshots = snapshots_in(config, kept, context, None if config.num_blocks else free_bytes() - spare)
        rings, marks = self._segment.rings(orders.rank, pinned), self._segment.marks(orders.rank)
        self._make = Maker(config, model, rings, context, snapshots, masks, self._segment.abort, marks=marks)
        needs = self._make.needs(kept)
        self._kept, self._left = kept, free_bytes() - needs.total - spare

    def blocks(self, offered: BlocksOffered) -> int:
        """See `RankPart.blocks`."""
        config, context = self._orders.config, self._orders.context
        self._make = replace(self._make, snapshots=offered.snapshots)
        return config.num_blocks or blocks_in(self._left, config, self._kept, context, offered.snapshots)

    def device(self, agreed: BlocksOffered) -> tuple[CudaDevice, str]:
        """See `RankPart.device`."""
        made = self._make.device(agreed.blocks, lambda done, total: None, is_trial=False)
        return made, captured(made, self._exchange, self._orders.config.launch_timeout_s)
