"""The files of whatever drafts with weights of its own, on any device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch

from runahead.runtime.checkpoint import Checkpoint, open_checkpoint, open_head
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.drafters.draft_model import DraftModelFiles, open_draft_model
from runahead.runtime.models.drafters.eagle import open_eagle
from runahead.runtime.models.drafters.head_files import HeadFiles
from runahead.runtime.models.drafters.mtp import open_mtp
from runahead.runtime.models.memory import KeptBytes
from runahead.runtime.process.parts import bytes_kept
from runahead.runtime.wire.engine_config import EngineConfig

DraftingFiles: TypeAlias = HeadFiles | DraftModelFiles


def drafting_files(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, context: int
) -> DraftingFiles | None:
    """The head or the model that drafts, where one does. Raises CheckpointError for one that does not fit."""
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


def kept_with_drafter(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, files: DraftingFiles | None
) -> KeptBytes:
    """What is kept for each KV block, each row and in each snapshot, with what a head or a model that drafts keeps.
    dtype: of weights and arithmetic, in which a drafter keeps keys and values."""
    kept = bytes_kept(config, model, dtype)
    return replace(kept, block=kept.block + kept_by_drafter(config, dtype, files))


def kept_by_drafter(config: EngineConfig, dtype: torch.dtype, files: DraftingFiles | None) -> int:
    """Bytes that it keeps in a KV block. files: None where nothing with weights drafts."""
    return 0 if files is None else files.block_bytes(config.block_size, dtype)
