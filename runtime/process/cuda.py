"""The GPU part of an engine: the model, and the device with its rings and graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from runahead.cuda_graphs.buckets import buckets_for, most_forward_tokens
from runahead.cuda_graphs.cuda_device import CudaDevice, allocate_mapped_rings, free_bytes
from runahead.cuda_graphs.rings import RingLayout, RingMemory, ring_bytes
from runahead.runtime.checkpoint import Checkpoint
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.load import load_model
from runahead.runtime.models.memory import KeptBytes, weight_bytes
from runahead.runtime.models.weights import part_of
from runahead.runtime.process import parts
from runahead.runtime.process.cuda_ranks import captured, start_ranks
from runahead.runtime.process.device_choice import check_gpu
from runahead.runtime.process.drafting_files import (
    drafting_bytes,
    drafting_files,
    drafts_with_weights,
    is_drawn,
    kept_by_drafter,
    kept_with_drafter,
)
from runahead.runtime.process.grammar_masks import make_masks
from runahead.runtime.process.parts import MadeOnDevice
from runahead.runtime.process.pool_fit import (
    TRIAL_BLOCKS,
    DraftingBytes,
    Needs,
    PoolFit,
    memory_facts,
    overhead,
    room_for_weights,
)
from runahead.runtime.process.progress import Progress
from runahead.runtime.process.rank_start import StartedRanks
from runahead.runtime.process.sizes import Gpu, device_boundary_tokens
from runahead.runtime.programs.cuda.draft_model import GpuDraftNetwork, load_drafter
from runahead.runtime.programs.cuda.program import (
    TritonProgram,
    gpu_kernels,
    keep_kernels,
    slots_with_drafts,
    tilings_of,
    use_tuned,
)
from runahead.runtime.rounding import ceil_div
from runahead.runtime.scheduler.draft_choice import FORMS
from runahead.runtime.scheduler.plan_bounds import FORCED_ROWS
from runahead.runtime.wire.engine_config import AUTO_DRAFTS, ConfigError, EngineConfig

DRAFT_ROWS: Final = 32  # most rows of a launch that verifies drafts
MIB: Final = 1 << 20
SAMPLER_BYTES: Final = 8  # of the sampler's buffers for each vocabulary entry and row, about


def make_on_cuda(
    config: EngineConfig,
    checkpoint: Checkpoint,
    described: ModelConfig,
    context: int,
    loading: Progress,
    capturing: Progress,
    gpus: Sequence[int] = (),
) -> MadeOnDevice:
    """A `MakeOnDevice`, of the current GPU; of the first GPUs where there are several ranks. Its graphs are captured
    here. gpus: numbers, by rank, for tests: ranks that share a GPU take turns, and are slow. Empty: GPU r for rank r.

    Raises ConfigError for a GPU that the kernels do not run on or that is too small, and where no host memory is left
    that the GPU could reach, and OSError where a kernel must be compiled and can't, or masks can't lie where the GPU
    reads them.
    """
    with ExitStack() as undo:
        made = _make(config, checkpoint, described, context, loading, capturing, undo, gpus)
        undo.pop_all()
    return made


def _make(
    config: EngineConfig,
    checkpoint: Checkpoint,
    described: ModelConfig,
    context: int,
    loading: Progress,
    capturing: Progress,
    undo: ExitStack,
    gpus: Sequence[int],
) -> MadeOnDevice:
    """Make the model and the device (`make_on_cuda`). undo: receives the callback that ends the other ranks."""
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    check_gpu(name, torch.cuda.get_device_capability(device), config)
    free, memory = torch.cuda.mem_get_info(device)
    dtype = parts.dtype_of(config, described)
    files = drafting_files(config, checkpoint, described, context)
    kept = kept_with_drafter(config, described, dtype, files)
    drafting = drafting_bytes(config, described, dtype, files)
    to_load = parts.bytes_to_load(config, checkpoint, described, "cuda")
    part = part_of(described, config.tensor_parallel)
    plain = part.parameters * dtype.itemsize // config.tensor_parallel
    config, why_sizes = parts.sized(config, to_load, context, Gpu(name, memory), kept, drafting, plain)
    keep_kernels(config.kernel_cache, config.spelling("kernel_cache"))
    use_tuned()
    _check_dtype(config, dtype)
    parts.check_tensors(config, checkpoint, described)
    to_load += drafting
    _check_memory(config, to_load, dtype, context, free, memory, kept)
    log = structlog.get_logger("engine")
    masks = make_masks(config, checkpoint, described, context)
    forced = parts.forced_drafts(config, described) if masks is not None else 0
    layout = parts.ring_layout(config, described, context, forced)
    ranks = start_ranks(config, checkpoint, described, context, layout, None if masks is None else forced, gpus)
    undo.callback(ranks.close)
    with room_for_weights(to_load):
        model = load_model(
            checkpoint, device, dtype, config.load_format, gpu_kernels(), loading, context, described, ranks.exchange,
            config.quantize, config.kv_dtype, frozenset() if files is None else files.shared(described),
        )  # fmt: skip
        head = None
        if files is not None:
            head = load_drafter(files, model, context, drawn=is_drawn(config, files, model))
    log.info("tilings", **tilings_of(model, buckets_for(config.max_rows)))
    ranks.loaded()
    rings = ranks.rings(layout, lambda layout: _rings(config, layout))
    kept = kept_with_drafter(config, described, model.dtype, files)
    snapshots = parts.snapshots_in(
        config, kept, context, None if config.num_blocks else free_bytes() - overhead(memory)
    )
    of_masks, of_head = None if masks is None else masks.memory, kept_by_drafter(config, model.dtype, files)
    make = Maker(config, model, rings, context, snapshots, of_masks, ranks.stop, head, of_head, ranks.marks)
    own, blocks, snapshots = _fitted(make, kept, memory, capturing, ranks)
    served = ranks.device(own, captured(own, ranks.exchange, config.launch_timeout_s), config.counters_from)
    made = MadeOnDevice(
        config, why_sizes, model, blocks, served, None, masks, draft_rows=make.draft_rows, snapshots=snapshots
    )
    return made if head is None else replace(made, draft_step=head.step_fraction, draft_parameters=head.parameters)


def _rings(config: EngineConfig, layout: RingLayout) -> RingMemory:
    """Raises ConfigError where the host has no memory left that the GPU could reach."""
    try:
        return allocate_mapped_rings(layout)
    except OSError as error:
        names = [config.spelling(name) for name in ("max_prefill_tokens", "max_rows", "run_ahead")]
        raise ConfigError(
            f"{error}; plans and results of launches take {ring_bytes(layout) / MIB:.1f} MiB of it in all: set "
            f"{names[0]}, {names[1]} or {names[2]} to less, or give the host more memory"
        ) from error


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes devices for a model with pools of any size, one after the other: they share the rings, and the masks.

    stop_ranks: called if a device can't be made; afterwards no GPU waits for another one. head: that drafts;
    head_block: bytes that it keeps in a KV block. marks: see `CudaDevice.marks_in`.
    """

    config: EngineConfig
    model: Decoder
    rings: RingMemory
    context: int
    snapshots: int
    masks: MaskMemory | None
    stop_ranks: Callable[[], None]
    head: GpuDraftNetwork | None = None
    head_block: int = 0
    marks: NDArray[np.int64] | None = None

    @property
    def draft_rows(self) -> int:
        return rows_with_drafts(self.config, self.forced)

    @property
    def forced(self) -> int:
        """Return the most drafts of a row with a grammar; 0: there are no such rows."""
        return 0 if self.masks is None else self.masks.drafts

    def device(self, blocks: int, progress: Progress, is_trial: bool) -> CudaDevice:
        """Make a device, the only owner of its program and pool. Except for a trial, it reserves memory of launches.

        Launches without a graph run when all graphs exist, so warm-up and capture may use that memory before.
        Raises torch.OutOfMemoryError if memory does not suffice for both.
        """
        try:
            return self._device(blocks, progress, is_trial)
        except BaseException:
            self.stop_ranks()  # or freeing memory would wait for launches that wait for other ranks
            raise

    def _device(self, blocks: int, progress: Progress, is_trial: bool) -> CudaDevice:
        config = self.config
        mixed_tokens = config.max_rows + config.max_prefill_tokens
        program = TritonProgram(
            self.model,
            self.rings,
            max_rows=config.max_rows,
            max_tokens=mixed_tokens,
            num_blocks=blocks,
            block_size=config.block_size,
            context_length=self.context,
            penalty_slots=config.penalty_slots,
            drafts=parts.most_drafts(config),
            draft_rows=self.draft_rows,
            masks=self.masks,
            snapshots=self.snapshots,
            snapshot_tokens=device_boundary_tokens(config, self.context),
            head=self.head,
            sampled_vocab=parts.sampled_vocab(config, self.model.config),
        )
        device = CudaDevice(
            program,
            self.rings,
            max_rows=config.max_rows,
            mixed_tokens=mixed_tokens,
            progress=progress,
            launched=config.counters_from,
            draft_forms=draft_forms(config, self.forced),
            draft_rows=self.draft_rows,
            is_trial=is_trial,
            masked=self.masks is not None,
            forced_rows=FORCED_ROWS if drafts_with_weights(config) and self.forced else 0,
            forward_tokens=most_forward_tokens(config.max_rows),
            marks_in=self.marks,
        )
        if not is_trial:
            try:
                device.hold_memory()
            except BaseException:
                self.stop_ranks()
                device.close()
                raise
        return device

    def facts(self, kept: KeptBytes, blocks: int) -> dict[str, int]:
        """Return the bytes of weights and pools by name, with a head's listed separately."""
        of_head = None if self.head is None else DraftingBytes(self.head.weight_bytes, self.head_block)
        return memory_facts(self.config, self.model, kept, blocks, self.snapshots, of_head)

    def states(self, kept: KeptBytes) -> int:
        """Return the bytes of the states of rows and snapshots, which every device has."""
        return parts.state_bytes_held(self.config, kept, self.snapshots)

    def within(self, memory: int, kept: KeptBytes) -> Maker:
        """Return the maker with the snapshots that fit into a part of `memory` bytes, unless their number is set."""
        most = None if self.config.num_blocks else memory
        return replace(self, snapshots=min(self.snapshots, parts.snapshots_in(self.config, kept, self.context, most)))

    def fit(self, kept: KeptBytes, capturing: Progress) -> PoolFit[CudaDevice]:
        return PoolFit(
            self.config,
            weight_bytes(self.model.weights) + (0 if self.head is None else self.head.weight_bytes),
            kept,
            self.snapshots,
            lambda blocks: self.device(blocks, capturing, is_trial=False),
            lambda blocks: parts.check_blocks(blocks, self.config, self.context, kept, self.snapshots),
            lambda: torch.cuda.empty_cache(),
        )

    def needs(self, kept: KeptBytes) -> Needs:
        """Measure the memory of the largest launches with a pool of a few blocks, and free it."""
        device = self.device(TRIAL_BLOCKS, lambda done, total: None, is_trial=True)
        taken, left = device.taken, free_bytes()
        device.close()
        del device
        gc.collect()
        given_back = free_bytes() - left  # without what stays, such as loaded kernels
        pool = TRIAL_BLOCKS * kept.block + self.states(kept)
        return Needs(max(0, given_back - taken.graphs - pool), taken.launches, taken.graphs)


def _fitted(
    make: Maker, kept: KeptBytes, memory: int, capturing: Progress, ranks: StartedRanks
) -> tuple[CudaDevice, int, int]:
    """Return the device, its number of blocks (as configured, or what fits after a trial), and its number of
    snapshots, bounded by `snapshots_in`.

    memory: of the GPU. Raises ConfigError if it does not suffice.
    """
    config, log = make.config, structlog.get_logger("engine")
    needs = make.fit(kept, capturing).tried(lambda: make.needs(kept))
    free, spare = free_bytes(), overhead(memory)
    left = free - needs.total - spare
    make = make.within(left, kept)
    blocks = config.num_blocks or parts.blocks_in(left, config, kept, make.context, make.snapshots)
    blocks = ranks.least(blocks, make.snapshots)
    if config.tensor_parallel > 1:  # a second attempt would need another agreement of the ranks
        make = replace(make, config=msgspec.structs.replace(config, num_blocks=blocks))
    parts.check_blocks(blocks, config, make.context, kept, make.snapshots)
    log.info(
        "memory",
        **make.facts(kept, blocks),
        **draft_memory(config, make.model.config, make.context, make.masks),
        **needs.by_name(),
        overhead_bytes=spare,
        free_bytes=free,
        of_bytes=memory,
    )
    device, held = make.fit(kept, capturing).built(blocks, needs)
    log.info(
        "memory_taken",
        **make.facts(kept, held),
        **Needs(needs.buffers, *device.taken).by_name(),
        free_bytes=torch.cuda.mem_get_info()[0],  # memory that the allocator holds is not freed
        of_bytes=memory,
    )
    return device, held, make.snapshots


def draft_forms(config: EngineConfig, forced: int = 0) -> tuple[int, ...]:
    """Return the numbers of drafts above 0 that launches are captured with: a drafter's, or the most that grammars may
    force. forced: most drafts of a row with a grammar; 0: no such rows.
    """
    if config.drafter == "none":
        return (forced,) if forced else ()
    return FORMS if config.draft_tokens == AUTO_DRAFTS else (config.draft_tokens,)


def rows_with_drafts(config: EngineConfig, forced: int = 0) -> int:
    """Return the most rows of a launch that verifies drafts. 0: nothing drafts. forced: see `draft_forms`."""
    most = DRAFT_ROWS if config.drafter != "none" else FORCED_ROWS
    if config.drafter == "none" and not forced:
        return 0
    return max(rows for rows in buckets_for(config.max_rows) if rows <= most)


def draft_memory(
    config: EngineConfig, model: ModelConfig, context: int, masks: MaskMemory | None = None
) -> dict[str, int]:
    """Return the bytes of drafts and masks by name: logits of runs and their sampler buffers (by row slot if rows may
    be held, for slots that may have drafts), token histories, block tables, and masks on the GPU and in pinned host
    memory. All but the last are among the buffers that the trial measures. masks: None: no row has a grammar.
    """
    forced = 0 if masks is None else masks.drafts
    rows, slots, most = rows_with_drafts(config, forced), config.max_rows + 1, max(parts.most_drafts(config), forced)
    found: dict[str, int] = {}
    if rows:
        lines = rows * (1 + most)
        kept = lines  # beyond the logits of plain rows
        if masks is not None:
            kept = slots_with_drafts(config.max_rows, rows) * most
        sampled = SAMPLER_BYTES * max(0, lines - config.max_rows)  # plain rows use the sampler's buffers too
        found |= {
            "run_logits_bytes": (4 * kept + sampled) * model.vocab_size,
            "history_bytes": 4 * slots * context if config.drafter == "ngram" else 0,
            "run_table_bytes": 4 * lines * ceil_div(context, config.block_size),
        }
    if masks is not None:
        line = masks.lines[0].nbytes  # of a row slot, with its lines after drafts
        found |= {"mask_bytes": slots * line, "mask_host_bytes": masks.words.nbytes}
    return found


def _check_memory(
    config: EngineConfig, weight_bytes: int, dtype: torch.dtype, context: int, free: int, memory: int, kept: KeptBytes
) -> None:
    """Raise ConfigError if the weights and one request do not fit into `free` bytes, before the weights are read.
    memory: of the GPU. weight_bytes, kept: including drafters'.
    """
    if weight_bytes > free:
        raise ConfigError(
            f"the weights take {weight_bytes >> 20} MiB in {str(dtype).removeprefix('torch.')}, and the GPU has "
            f"{free >> 20} MiB free: serve a smaller model, or end other processes on the GPU"
        )
    parts.check_blocks(
        parts.blocks_in(free - weight_bytes - overhead(memory), config, kept, context), config, context, kept
    )


def _check_dtype(config: EngineConfig, dtype: torch.dtype) -> None:
    """Raise ConfigError for ranks in another dtype than bfloat16."""
    ranks = config.tensor_parallel
    if ranks > 1 and dtype != torch.bfloat16:
        raise ConfigError(
            f"{config.spelling('tensor_parallel')} {ranks} can't be: ranks on GPUs exchange sums in bfloat16, and the "
            f"model is served in {str(dtype).removeprefix('torch.')}"
        )
