"""Puts an engine together from its configuration: model, device, rings, pool, scheduler."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Final

import structlog
import torch

from runahead.cuda_graphs.host_device import HostDevice, seeded_delays
from runahead.cuda_graphs.rings import allocate_rings
from runahead.runtime.models.cpu_kernels import choose_kernels
from runahead.runtime.models.load import load_model
from runahead.runtime.models.read_config import load_config
from runahead.runtime.process.parts import (
    Assembled,
    Progress,
    blocks_in,
    check_blocks,
    check_model,
    engine_info,
    make_scheduler,
    ring_layout,
)
from runahead.runtime.programs.poison import RingPoison
from runahead.runtime.programs.reference import HostProgram
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig, check_config

_CPU_CACHE_BYTES: Final = 1 << 30  # what the CPU device's KV cache may take where `num_blocks` is 0


def assemble(config: EngineConfig, progress: Progress) -> Assembled:
    """Load the model and make the device. `progress`: bytes loaded, bytes in all.

    Raises ConfigError for invalid settings, CheckpointError for a checkpoint that can't be served,
    NoKernelsError for a processor on which no kernels of the CPU device keep rows apart.
    """
    check_config(config)
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("device cuda is set and torch finds no CUDA GPU")
        from runahead.runtime.process.cuda import assemble_cuda

        return assemble_cuda(config, progress)
    torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 2) - 1))
    dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    folder = Path(config.model)
    described = load_config(folder)
    context = check_model(config, described)
    blocks = config.num_blocks or blocks_in(_CPU_CACHE_BYTES, config, described, context, dtype)
    check_blocks(blocks, config, context)
    log = structlog.get_logger("engine")
    log.info("trying_kernels", threads=torch.get_num_threads())  # seconds, for a model of a billion parameters
    kernels, trial = choose_kernels(described)
    log.info("kernels_tried", **asdict(trial))
    model = load_model(folder, torch.device("cpu"), dtype, config.load_format, kernels, progress, context, described)
    rings = allocate_rings(ring_layout(config, model.config))
    program = HostProgram(
        model,
        rings,
        max_rows=config.max_rows,
        num_blocks=blocks,
        block_size=config.block_size,
        context_length=context,
        penalty_slots=config.penalty_slots,
        launched=config.counters_from,
    )
    if config.jitter_seed is None:
        return Assembled(
            HostDevice(program, rings, launched=config.counters_from),
            make_scheduler(config, model.config, blocks, context),
            engine_info(config, model, blocks, context, dtype),
            None,
        )
    return Assembled(
        HostDevice(program, rings, seeded_delays(config.jitter_seed), launched=config.counters_from),
        make_scheduler(config, model.config, blocks, context),
        engine_info(config, model, blocks, context, dtype),
        RingPoison(program, rings),
    )
