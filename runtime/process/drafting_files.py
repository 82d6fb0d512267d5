"""Opens the files of a draft head or draft model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch

from runahead.runtime.checkpoint import Checkpoint, open_checkpoint, open_head
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.drafters.draft_model import DraftModelFiles, open_draft_model
from runahead.runtime.models.drafters.eagle import open_eagle
from runahead.runtime.models.drafters.head_files import HeadFiles
from runahead.runtime.models.drafters.mtp import open_mtp
from runahead.runtime.models.memory import KeptBytes
from runahead.runtime.process.parts import bytes_kept
from runahead.runtime.wire.engine_config import EngineConfig

DraftingFiles: TypeAlias = HeadFiles | DraftModelFiles


def drafts_with_weights(config: EngineConfig) -> bool:
    """Whether the drafter is a head or a model: on the first rank, which drafts for all."""
    return config.drafter not in ("none", "ngram")


def drafting_files(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, context: int
) -> DraftingFiles | None:
    """Open the draft head or draft model, if any. Raises CheckpointError if it does not fit."""
    folder, has_weights = Path(config.draft_model), config.load_format != "dummy"
    settings = config.spelling("draft_model"), config.spelling("context_length")
    if config.drafter == "eagle":
        return open_eagle(open_head(folder), model, context, *settings)
    if config.drafter == "mtp":
        return open_mtp(checkpoint, model, f"{config.spelling('drafter')} mtp", has_weights=has_weights)
    if config.drafter == "model":
        own = open_checkpoint(folder)
        return open_draft_model(own, model, checkpoint, context, *settings, has_weights=has_weights)
    return None


def drafting_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, files: DraftingFiles | None) -> int:
    """Return the bytes of a drafter's weights on the first rank, which drafts for all, and of other ranks' rows of the
    model's matrices that it reads, without copies that a CPU's kernels make. files: None without a drafter with
    weights."""
    if files is None:
        return 0
    matrix, ranks = model.vocab_size * model.hidden_size, config.tensor_parallel
    return dtype.itemsize * (files.parameters + len(files.shared(model)) * (matrix - matrix // ranks))


def kept_with_drafter(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, files: DraftingFiles | None
) -> KeptBytes:
    """Return the bytes of each KV block, row and snapshot, a drafter's included. dtype: of weights and arithmetic,
    which a drafter uses for keys and values.
    """
    kept = bytes_kept(config, model, dtype)
    return replace(kept, block=kept.block + kept_by_drafter(config, dtype, files))


def kept_by_drafter(config: EngineConfig, dtype: torch.dtype, files: DraftingFiles | None) -> int:
    """Return a drafter's bytes in a KV block. files: None without a drafter with weights."""
    return 0 if files is None else files.block_bytes(config.block_size, dtype)


def is_drawn(config: EngineConfig, files: DraftingFiles, target: Decoder) -> bool:
    """Whether a drafter's weights are random. A head with its own folder is read even for a random model. Raises
    CheckpointError for a head whose copy of the target's embedding differs.
    """
    if config.load_format != "dummy":
        if isinstance(files, HeadFiles):
            files.check_copies(target)
        return False
    return config.drafter != "eagle"
