"""Makes the mask worker."""

from __future__ import annotations

import structlog

from runahead.runtime.checkpoint import Checkpoint
from runahead.runtime.grammar.extra import is_installed
from runahead.runtime.masks.mask_worker import PROCESSOR_S, RUNNING_S, MaskWorker
from runahead.runtime.masks.worker_messages import Begin
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.process.parts import forced_drafts
from runahead.runtime.wire.engine_config import EngineConfig


def make_masks(config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, context: int) -> MaskWorker | None:
    """Make the mask worker; None without the library, a tokenizer or an end-of-sequence token, which structured
    completions need. config: with every size.

    Raises OSError without memory for masks.
    """
    if not (is_installed() and checkpoint.has_tokenizer and model.eos_token_ids):
        return None
    log = structlog.get_logger("engine")
    begin = Begin(
        config.model,
        model.vocab_size,
        model.eos_token_ids,
        config.max_rows,
        drafts=forced_drafts(config, model),
        context_length=context if config.drafter == "ngram" else 0,  # a head guesses nothing for these rows
    )
    # Ends the worker before the engine's watchdog stops the engine for requests without progress.
    most_s = config.launch_timeout_s / 2
    return MaskWorker(
        begin,
        lambda what: log.error("mask_worker", what=what),
        processor_s=min(PROCESSOR_S, most_s),
        running_s=min(RUNNING_S, most_s),
    )
