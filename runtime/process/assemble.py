"""Puts an engine together from its configuration: model, device, rings, pool, scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import structlog
import torch

from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.log_output import LogOutput
from runahead.runtime.masks.masks import NoMasks
from runahead.runtime.models.read_config import load_config
from runahead.runtime.process.cpu import make_on_cpu
from runahead.runtime.process.device_choice import why_no_gpu, with_device
from runahead.runtime.process.engine_info import engine_info
from runahead.runtime.process.parts import (
    Assembled,
    MakeOnDevice,
    check_model,
    finds_prefixes,
    forced_drafts,
    make_scheduler,
    why_no_prefixes,
)
from runahead.runtime.process.progress import Progress, shown_captures
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig, check_config

_LINES: Final = LogOutput(format="json")  # what is shown is lines, also on a terminal


def assemble(config: EngineConfig, loading: Progress, capturing: Progress | None = None) -> Assembled:
    """Load the model and make the device.

    loading: is told of bytes. capturing: is told of graphs; None logs them.

    Raises ConfigError for invalid settings, CheckpointError for a checkpoint that can't be served,
    NoKernelsError for a processor on which no kernels of the CPU device keep rows apart.
    """
    check_config(config, config.spelling)
    config = with_device(config)
    make = _maker(config)
    checkpoint = open_checkpoint(Path(config.model))
    described = load_config(checkpoint)
    context = check_model(config, described)
    made = make(config, checkpoint, described, context, loading, capturing or shown_captures(_LINES))
    if config.prefix_cache and not finds_prefixes(config, described, made.snapshots, context):
        structlog.get_logger("engine").info("prefix_cache_off", why=why_no_prefixes(config, described, context))
    info = engine_info(made, context, checkpoint)
    for weights in info.weights:
        structlog.get_logger("engine").info("weights", **msgspec.structs.asdict(weights))
    return Assembled(
        made.device,
        make_scheduler(
            made.config,
            described,
            made.blocks,
            context,
            made.draft_rows,
            forced_drafts(config, described) if made.masks else 0,
            made.draft_step,
            made.snapshots,
        ),
        info,
        made.poison,
        made.masks or NoMasks(),
    )


def _maker(config: EngineConfig) -> MakeOnDevice:
    """What is of one kind of device. Raises ConfigError where that is not there."""
    if config.device == "cpu":
        return make_on_cpu
    if not torch.cuda.is_available():
        raise ConfigError(f"{config.spelling('device')} cuda: {why_no_gpu()}; --device cpu serves without a GPU")
    from runahead.runtime.process.cuda import make_on_cuda  # not where there is no GPU: it loads Triton

    return make_on_cuda
