"""What a rank other than the first does on its GPU: the same start as rank 0's, and then the launches that it finds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from runahead.cuda_graphs.cuda_device import free_bytes
from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.models.load import load_model
from runahead.runtime.models.read_config import load_config
from runahead.runtime.process.cuda import Maker
from runahead.runtime.process.cuda_ranks import joined
from runahead.runtime.process.parts import blocks_in, bytes_kept, dtype_of, snapshots_in
from runahead.runtime.process.pool_fit import overhead, room_for_weights
from runahead.runtime.process.rank_messages import (
    BlocksMade,
    BlocksOffered,
    Captured,
    Mailbox,
    Mailboxes,
    RankLoaded,
    RankOrders,
    digest,
    what_differs,
)
from runahead.runtime.programs.cuda.program import gpu_kernels, keep_kernels, use_tuned
from runahead.runtime.ranks.rank_loop import follow_launches
from runahead.runtime.ranks.segment import Segment


def follow(
    orders: RankOrders,
    memory: memoryview,
    say: Callable[[msgspec.Struct], None],
    hear: Callable[[type[Any]], Any],
    began: Callable[[], None],
) -> None:
    """Load the rank's part, capture the graphs that rank 0 captures, and follow launches until the segment says stop.
    memory: the segment's. began: called before the first launch.

    Raises ConfigError, CheckpointError, DeviceError, PeerMemoryError.
    """
    config, context = orders.config, orders.context
    torch.cuda.set_device(orders.gpu)
    keep_kernels(config.kernel_cache, config.spelling("kernel_cache"))
    use_tuned()

    def handles_of(own: str) -> tuple[str, ...]:
        say(Mailbox(own))
        heard: Mailboxes = hear(Mailboxes)
        return heard.handles

    own = joined(orders.rank, Segment(orders.layout, memory, config.counters_from), memory, handles_of)
    checkpoint = open_checkpoint(Path(config.model))
    described = load_config(checkpoint)
    found = digest(checkpoint, described, orders.layout, has_weights=config.load_format != "dummy")
    device, dtype = torch.device("cuda", orders.gpu), dtype_of(config, described)
    with room_for_weights(0):
        model = load_model(
            checkpoint, device, dtype, config.load_format, gpu_kernels(), None, context, described,
            own.exchange, config.quantize, config.kv_dtype,
        )  # fmt: skip
    say(RankLoaded(what_differs(found, orders.digest)))
    # Rank 0's grammars decide; this memory is read by nobody, and says how many drafts they may force.
    masks = None if orders.forced is None else MaskMemory(config.max_rows, described.vocab_size, orders.forced)
    kept, spare = bytes_kept(config, described, dtype), overhead(torch.cuda.mem_get_info()[1])
    snapshots = snapshots_in(config, kept, context, None if config.num_blocks else free_bytes() - spare)
    make = Maker(config, model, own.rings(), context, snapshots, masks, own.segment.abort, marks=own.marks())
    needs = make.needs(kept)
    left, offered = free_bytes() - needs.total - spare, hear(BlocksOffered)
    make = replace(make, snapshots=offered.snapshots)
    say(BlocksMade(config.num_blocks or blocks_in(left, config, kept, context, make.snapshots)))
    final: BlocksOffered = hear(BlocksOffered)
    made = make.device(final.blocks, lambda done, total: None, is_trial=False)
    say(Captured(own.digest(made)))
    own.exchange.limit(config.launch_timeout_s)
    torch.cuda.synchronize()
    gc.collect()
    gc.freeze()  # what was made so far lives as long as the process
    began()
    try:
        follow_launches(made, own.segment, orders.rank, config.counters_from)
    finally:
        own.segment.abort()  # what waits for other ranks stops
        made.close()
