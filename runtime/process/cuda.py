"""Puts an engine for a CUDA GPU together: the counterpart of what `runahead.runtime.process.assemble` does for the
CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
import torch

from runahead.cuda_graphs.cuda_device import CudaDevice, allocate_mapped_rings
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
from runahead.runtime.programs.triton import TritonProgram, gpu_kernels
from runahead.runtime.wire.engine_config import EngineConfig

_CACHE_SHARE: Final = 0.85  # of the GPU's memory left after the weights, for the KV cache


def assemble_cuda(config: EngineConfig, progress: Progress) -> Assembled:
    """Load the model onto the current GPU and capture its graphs, and log how many are captured.

    progress: bytes loaded, bytes in all.

    Raises ConfigError for invalid settings, CheckpointError for a checkpoint that can't be served.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    folder = Path(config.model)
    described = load_config(folder)
    context = check_model(config, described)
    model = load_model(folder, device, dtype, config.load_format, gpu_kernels(), progress, context, described)
    free, _ = torch.cuda.mem_get_info(device)
    blocks = config.num_blocks or blocks_in(int(free * _CACHE_SHARE), config, model.config, context, model.dtype)
    check_blocks(blocks, config, context)
    rings = allocate_mapped_rings(ring_layout(config, model.config))
    mixed_tokens = config.max_rows + config.max_prefill_tokens
    program = TritonProgram(
        model,
        rings,
        max_rows=config.max_rows,
        max_tokens=mixed_tokens,
        num_blocks=blocks,
        block_size=config.block_size,
        context_length=context,
        penalty_slots=config.penalty_slots,
    )
    return Assembled(
        CudaDevice(
            program,
            rings,
            max_rows=config.max_rows,
            mixed_tokens=config.max_prefill_tokens,
            progress=_log_captures(),
            launched=config.counters_from,
        ),
        make_scheduler(config, model.config, blocks, context),
        engine_info(config, model, blocks, context, model.dtype),
        None,
    )


def _log_captures() -> Callable[[int, int], None]:
    """Logs each further quarter of the graphs captured."""
    log = structlog.get_logger("engine")
    shown = -1

    def progress(done: int, total: int) -> None:
        nonlocal shown
        quarter = 4 * done // max(total, 1)
        if quarter > shown:
            shown = quarter
            log.info("capturing", graphs=done, of_graphs=total)

    return progress
