"""What the engine tells its front ends of itself once it is made."""

from __future__ import annotations

from pathlib import Path

from runahead.runtime.checkpoint import Checkpoint, model_name
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.drafters.head_files import may_have_head
from runahead.runtime.models.drafters.mtp import comes_with_head
from runahead.runtime.models.layer_kinds import layer_kinds
from runahead.runtime.models.weight_formats import weight_formats
from runahead.runtime.process.parts import (
    MadeOnDevice,
    bytes_kept,
    finds_prefixes,
    sampled_vocab,
    state_bytes,
)
from runahead.runtime.process.snapshot_borders import border_tokens
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.runtime.wire.messages import EngineInfo
from runahead.runtime.wire.prompt_launches import PromptLaunches


def engine_info(made: MadeOnDevice, context: int, checkpoint: Checkpoint) -> EngineInfo:
    """What the engine says of itself. checkpoint: the model's."""
    config, model = made.config, made.model
    return EngineInfo(
        model=config.served_name or model_name(Path(config.model)),
        architecture=model.config.architecture,
        vocab_size=model.config.vocab_size,
        context_length=context,
        eos_token_ids=model.config.eos_token_ids,
        bos_token_id=-1 if model.config.bos_token_id is None else model.config.bos_token_id,
        max_rows=config.max_rows,
        max_queue=config.max_queue,
        num_blocks=made.blocks,
        block_size=config.block_size,
        run_ahead=config.run_ahead,
        device=config.device,
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=model.num_parameters,
        tensor_parallel=config.tensor_parallel,
        penalty_slots=config.penalty_slots,
        prefix_cache=finds_prefixes(config, model.config, made.snapshots, context),
        state_bytes=bytes_kept(config, model.config, model.dtype).row,
        snapshots=made.snapshots,
        snapshot_blocks=border_tokens(config, context) // config.block_size if made.snapshots else 0,
        exactness=made.exactness,
        structures=made.masks is not None,
        layers=layer_kinds(model.weights.layers),
        drafters=drafters_of(config, model.config, checkpoint),
        weights=()
        if config.load_format == "dummy"
        else weight_formats(checkpoint, model.config, model.dtype, model.device.type, config.quantize),
        drafter=config.drafter,
        draft_parameters=made.draft_parameters,
        prompt_launches=PromptLaunches(
            config.prefill_chunk,
            config.max_prefill_tokens,
            config.run_ahead_tokens,
            made.why_sizes,
            config.mixed_prefill_tokens,
        ),
        sampled_vocab=sampled_vocab(config, model.config),
    )


def drafters_of(config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Drafters that a start could ask for with this model, some with a head that was made for it."""
    comes = comes_with_head(checkpoint, model, has_weights=config.load_format != "dummy")
    mtp = ("mtp",) if comes else ()
    if state_bytes(model):
        return ("ngram", *mtp)
    return ("ngram", *(("eagle",) if may_have_head(model) else ()), *mtp, "model")
