"""A model on CPUs: its row-invariant kernels, the device with its rings, and the ranks, a process each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Final

import structlog
import torch

from runahead.cuda_graphs.host_device import HostDevice, no_delay, seeded_delays
from runahead.cuda_graphs.rings import RingLayout, RingMemory, allocate_rings
from runahead.runtime.checkpoint import Checkpoint
from runahead.runtime.drafters.ngram import NgramDrafter
from runahead.runtime.engine.poison import Poison
from runahead.runtime.masks.mask_worker import MaskWorker
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.cpu_check.cpu_kernels import KernelTrial, kernels_of, products_of_a_rank, tried_kernels
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.drafters.draft_model import DraftNetwork
from runahead.runtime.models.drafters.head_files import HeadFiles
from runahead.runtime.models.load import load_model
from runahead.runtime.models.memory import weight_bytes
from runahead.runtime.process import parts
from runahead.runtime.process.drafting_files import (
    drafting_bytes,
    drafting_files,
    is_drawn,
    kept_by_drafter,
    kept_with_drafter,
)
from runahead.runtime.process.grammar_masks import make_masks
from runahead.runtime.process.parts import MadeOnDevice
from runahead.runtime.process.pool_fit import DraftingBytes, PoolFit, is_out_of_memory, memory_facts, room_for_weights
from runahead.runtime.process.progress import Progress
from runahead.runtime.process.rank_start import BlocksOffered, RankOrders, StartedRanks, start_processes
from runahead.runtime.process.sizes import Cpu, device_boundary_tokens
from runahead.runtime.programs.cpu.program import HostProgram
from runahead.runtime.ranks.exchange import HostRanks
from runahead.runtime.ranks.segment import Segment, SegmentLayout
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig

_CPU: Final = torch.device("cpu")
_CACHE_BYTES: Final = 1 << 30  # for the KV caches of all ranks if `num_blocks` is 0

_LEAST_NUMBERS: Final = 1 << 18  # of a step of an exchange: 1 MiB a rank

_SMALLER: Final = (9, 10)  # the pool that a rank makes over the one that it has no memory for


def make_on_cpu(
    config: EngineConfig,
    checkpoint: Checkpoint,
    described: ModelConfig,
    context: int,
    loading: Progress,
    capturing: Progress,
) -> MadeOnDevice:
    """Make the model and device (`MakeOnDevice`). Raises NoKernelsError without row-invariant kernels."""
    dtype = parts.dtype_of(config, described)
    files = drafting_files(config, checkpoint, described, context)
    kept = kept_with_drafter(config, described, dtype, files)
    cache, drafting = _CACHE_BYTES // config.tensor_parallel, drafting_bytes(config, described, dtype, files)
    to_load = parts.bytes_to_load(config, checkpoint, described, "cpu")
    config, why_sizes = parts.sized(config, to_load, context, Cpu(cache), kept, drafting)
    snapshots = parts.snapshots_in(config, kept, context, None if config.num_blocks else cache)
    blocks = config.num_blocks or parts.blocks_in(cache, config, kept, context, snapshots)
    parts.check_blocks(blocks, config, context, kept, snapshots)
    parts.check_tensors(config, checkpoint, described)
    log = structlog.get_logger("engine")
    threads = config.threads or max(1, ((os.cpu_count() or 2) - 1) // config.tensor_parallel)
    log.info("trying_kernels", threads=threads)  # seconds, for a model of a billion parameters
    of_drafter = files.shapes() if isinstance(files, HeadFiles) else ()  # a draft model has its own kernels
    more = (*of_drafter, *products_of_a_rank(described, config.tensor_parallel))
    kernels, trial = tried_kernels(described, threads, more, fixed=config.threads > 0)
    log.info("kernels_tried", **asdict(trial))
    masks = make_masks(config, checkpoint, described, context)
    forced = parts.forced_drafts(config, described) if masks else 0
    layout = parts.ring_layout(config, described, context, forced)
    with contextlib.ExitStack() as undo:
        ranks = start_ranks(config, checkpoint, described, context, layout, trial)
        undo.callback(ranks.close)
        head, rings = None, ranks.rings(layout, allocate_rings)
        with room_for_weights(to_load + drafting):
            model = load_model(
                checkpoint, _CPU, dtype, config.load_format, kernels, loading, context, described, ranks.exchange,
                config.quantize, config.kv_dtype, frozenset() if files is None else files.shared(described),
            )  # fmt: skip
            if files is not None:
                head = files.load(model, kernels, context, drawn=is_drawn(config, files, model))

        def program_with(blocks: int) -> HostProgram:
            return host_program(config, model, rings, context, blocks, snapshots, head, masks)

        def check(blocks: int) -> None:
            parts.check_blocks(blocks, config, context, kept, snapshots)

        of_head = None if head is None else DraftingBytes(head.weight_bytes, kept_by_drafter(config, dtype, files))
        taken = weight_bytes(model.weights) + (of_head.weights if of_head else 0)
        program, blocks = PoolFit(config, taken, kept, snapshots, program_with, check).built(blocks)
        ranks.loaded()
        if (least := ranks.least(blocks, snapshots)) != blocks:
            program, blocks = program_with(least), least
        if blocks < config.num_blocks:
            setting = f"{config.spelling('num_blocks')} {config.num_blocks}"
            raise ConfigError(f"{setting} is more than a rank has memory for: {blocks}")
        check(blocks)
        facts = memory_facts(config, model, kept, blocks, snapshots, of_head)
        log.info("memory", **facts, **_draft_memory(config, described, context, forced))
        poison = None if config.jitter_seed is None else Poison(program, rings)
        launched = config.counters_from
        own = HostDevice(
            program, rings, delays(config, 0), launched=launched, marks=ranks.marks, late_tail=has_jitter(config)
        )
        device = ranks.device(own, "", launched)
        undo.pop_all()
    made = MadeOnDevice(config, why_sizes, model, blocks, device, poison, masks, snapshots=snapshots)
    if head is None:
        return made
    return replace(made, draft_step=head.step_fraction, draft_parameters=head.parameters)


def delays(config: EngineConfig, rank: int) -> Callable[[], None]:
    """Return the test mode's delays, different on each rank."""
    return no_delay if config.jitter_seed is None else seeded_delays(config.jitter_seed + rank)


def has_jitter(config: EngineConfig) -> bool:
    """Return whether the test mode with delays is on, in which tails are late, too."""
    return config.jitter_seed is not None


def host_program(
    config: EngineConfig,
    model: Decoder,
    rings: RingMemory,
    context: int,
    blocks: int,
    snapshots: int,
    head: DraftNetwork | None,
    masks: MaskWorker | None,
) -> HostProgram:
    """Make a rank's program with a pool of this many blocks. The first rank drafts for all."""
    is_first = model.ranks.shard.is_first
    return HostProgram(
        model,
        rings,
        max_rows=config.max_rows,
        num_blocks=blocks,
        block_size=config.block_size,
        context_length=context,
        penalty_slots=config.penalty_slots,
        snapshots=snapshots,
        snapshot_tokens=device_boundary_tokens(config, context),
        launched=config.counters_from,
        drafter=NgramDrafter(config.max_rows, context) if config.drafter == "ngram" and is_first else None,
        head=head,
        masks=None if masks is None else masks.memory,
        sampled_vocab=parts.sampled_vocab(config, model.config),
    )


def _draft_memory(config: EngineConfig, model: ModelConfig, context: int, forced: int) -> dict[str, int]:
    """Return the bytes of drafts by name: logits of a row's whole run, and a drafter's data of rows. forced: drafts of
    a row with a grammar.
    """
    drafts, slots = max(parts.most_drafts(config), forced), config.max_rows + 1
    if not drafts:
        return {}
    history = 4 * slots * context if config.drafter == "ngram" else 0
    return {"run_logits_bytes": 4 * slots * drafts * model.vocab_size, "history_bytes": history}


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
    others = start_processes(orders)
    return StartedRanks(HostRanks(others.segment, 0, config.launch_timeout_s), others)


class CpuRank:
    """A `RankPart` on a CPU. Its program is made to find out how many KV blocks there is memory for."""

    def __init__(self, orders: RankOrders, segment: Segment) -> None:
        self._exchange = HostRanks(segment, orders.rank, orders.config.launch_timeout_s)
        self._orders = orders
        self._rings, self._marks = segment.rings(orders.rank), segment.marks(orders.rank)

    def load(self, checkpoint: Checkpoint, described: ModelConfig) -> None:
        """See `RankPart.load`."""
        config, context = self._orders.config, self._orders.context
        kernels, dtype = kernels_of(self._orders.products), parts.dtype_of(config, described)
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
