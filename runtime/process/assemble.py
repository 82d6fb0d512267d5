"""Assembles an engine from its configuration: model, device, rings, pool and scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import structlog
import torch

from runahead.runtime.checkpoint import Checkpoint, model_name, open_checkpoint
from runahead.runtime.masks.masks import Masks
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.drafters.head_files import may_have_head
from runahead.runtime.models.drafters.mtp import comes_with_head
from runahead.runtime.models.layer_kinds import layer_kinds
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weight_formats import weight_formats
from runahead.runtime.process import parts
from runahead.runtime.process.cpu import make_on_cpu
from runahead.runtime.process.device_choice import why_no_gpu, with_device
from runahead.runtime.process.parts import Assembled, MadeOnDevice, MakeOnDevice
from runahead.runtime.process.progress import Progress, shown_captures
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig, check_config
from runahead.runtime.wire.messages import EngineInfo, Exactness, PromptLaunches

EXACT: Final = Exactness(True, "no order of sums depends on the rows beside a completion")


def engine_info(made: MadeOnDevice, limits: SchedulerLimits, checkpoint: Checkpoint) -> EngineInfo:
    """Describe the engine to front ends. checkpoint: the model's."""
    config, model = made.config, made.model
    return EngineInfo(
        model=config.served_name or model_name(Path(config.model)),
        architecture=model.config.architecture,
        vocab_size=model.config.vocab_size,
        context_length=limits.context_length,
        eos_token_ids=model.config.eos_token_ids,
        bos_token_id=-1 if model.config.bos_token_id is None else model.config.bos_token_id,
        max_rows=config.max_rows,
        max_queue=config.max_queue,
        num_blocks=made.blocks,
        block_size=config.block_size,
        run_ahead=config.run_ahead,
        device=config.device,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=config.kv_dtype if config.kv_dtype != "auto" else str(model.dtype).removeprefix("torch."),
        parameters=model.num_parameters,
        tensor_parallel=config.tensor_parallel,
        penalty_slots=config.penalty_slots,
        prefix_cache=limits.finds_prefixes,
        state_bytes=parts.bytes_kept(config, model.config, model.dtype).row,
        snapshots=made.snapshots,
        snapshot_blocks=limits.snapshot_tokens // config.block_size,
        exactness=EXACT,
        structures=made.masks is not None,
        layers=layer_kinds(model.weights.layers),
        drafters=drafters_of(config, model.config, checkpoint),
        weights=()
        if config.load_format == "dummy"
        else weight_formats(
            checkpoint, model.config, model.dtype, model.device.type, config.quantize, config.tensor_parallel
        ),
        drafter=config.drafter,
        draft_parameters=made.draft_parameters,
        prompt_launches=PromptLaunches(
            config.prefill_chunk,
            config.max_prefill_tokens,
            config.run_ahead_tokens,
            made.why_sizes,
            config.mixed_prefill_tokens,
        ),
        sampled_vocab=parts.sampled_vocab(config, model.config),
    )


def drafters_of(config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the drafters that a start could use with this model, including ones that need a head's files."""
    comes = comes_with_head(checkpoint, model, has_weights=config.load_format != "dummy")
    mtp = ("mtp",) if comes else ()
    if parts.state_bytes(model):
        return ("ngram", *mtp)
    return ("ngram", *(("eagle",) if may_have_head(model) else ()), *mtp, "model")


def assemble(config: EngineConfig, loading: Progress, capturing: Progress | None = None) -> Assembled:
    """Load the model and make the device.

    loading: receives loaded bytes. capturing: receives captured graphs; None logs them.

    Raises ConfigError for invalid settings, CheckpointError for an unsupported checkpoint, NoKernelsError without
    row-invariant kernels on a CPU.
    """
    check_config(config, config.spelling)
    config = with_device(config)
    make = _maker(config)
    checkpoint = open_checkpoint(Path(config.model))
    described = load_config(checkpoint)
    context = parts.check_model(config, described)
    made = make(config, checkpoint, described, context, loading, capturing or shown_captures())
    scheduler = parts.make_scheduler(
        made.config,
        described,
        made.blocks,
        context,
        made.draft_rows,
        parts.forced_drafts(config, described) if made.masks else 0,
        made.draft_step,
        made.snapshots,
    )
    if config.prefix_cache and not scheduler.limits.finds_prefixes:
        structlog.get_logger("engine").info("prefix_cache_off", why=parts.why_no_prefixes(config, described, context))
    info = engine_info(made, scheduler.limits, checkpoint)
    for weights in info.weights:
        structlog.get_logger("engine").info("weights", **msgspec.structs.asdict(weights))
    return Assembled(made.device, scheduler, info, made.poison, made.masks or Masks())


def _maker(config: EngineConfig) -> MakeOnDevice:
    """Return the function that makes a device of the configured kind. Raises ConfigError if there is none."""
    if config.device == "cpu":
        return make_on_cpu
    if not torch.cuda.is_available():
        raise ConfigError(f"{config.spelling('device')} cuda: {why_no_gpu()}; --device cpu serves without a GPU")
    from runahead.runtime.process.cuda import make_on_cuda  # only with a GPU: it loads Triton

    return make_on_cuda
