"""What of an engine is a CUDA GPU's: the model, and the device with its rings and graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec
import structlog
import torch

from runahead.cuda_graphs.cuda_device import CudaDevice, allocate_mapped_rings
from runahead.cuda_graphs.graph_pool import buckets_for
from runahead.runtime.checkpoint import Checkpoint
from runahead.runtime.models import weights
from runahead.runtime.models.config import ModelConfig
from runahead.runtime.models.load import load_model
from runahead.runtime.process.parts import (
    MadeOnDevice,
    Progress,
    blocks_in,
    bytes_kept,
    check_blocks,
    check_tensors,
    memory_facts,
    ring_layout,
)
from runahead.runtime.programs.triton import (
    NoExactKernelsError,
    TritonProgram,
    exactness_of,
    gpu_kernels,
    keep_kernels,
    tilings_of,
    use_gpu_as,
)
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig
from runahead.runtime.wire.messages import Exactness

LEAST_CAPABILITY: Final = (8, 0)
_CACHE_SHARE: Final = 0.85  # of the GPU's memory left after the weights, for the KV cache


def make_on_cuda(
    config: EngineConfig, checkpoint: Checkpoint, described: ModelConfig, context: int, progress: Progress
) -> MadeOnDevice:
    """A `MakeOnDevice`, of the current GPU. Its graphs are captured here; how many are is logged.

    Raises ConfigError for a GPU that the kernels do not run on, and OSError where a kernel must be compiled and can't.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    check_gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    keep_kernels(config.kernel_cache, config.spelling("kernel_cache"))
    use_gpu_as(config.gpu_capability)
    dtype = described.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    exactness = _exactness(config, described, dtype)
    check_tensors(config, checkpoint, described)
    log = structlog.get_logger("engine")
    log.info("exactness", asked=config.exact, **msgspec.structs.asdict(exactness))
    kernels = gpu_kernels(exactness.exact)
    model = load_model(checkpoint, device, dtype, config.load_format, kernels, progress, context, described)
    log.info("tilings", **tilings_of(model, buckets_for(config.max_rows), exactness.exact))
    free, _ = torch.cuda.mem_get_info(device)
    kept = bytes_kept(config, described, model.dtype)
    blocks = config.num_blocks or blocks_in(int(free * _CACHE_SHARE), config, kept, context)
    check_blocks(blocks, config, context)
    log.info("memory", **memory_facts(config, model, kept, blocks))
    rings = allocate_mapped_rings(ring_layout(config, described, context))
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
    captured = CudaDevice(
        program,
        rings,
        max_rows=config.max_rows,
        mixed_tokens=mixed_tokens,
        progress=_log_captures(),
        launched=config.counters_from,
    )
    return MadeOnDevice(model, blocks, captured, None, exactness)


def check_gpu(name: str, capability: tuple[int, int]) -> None:
    """Raises ConfigError for a GPU whose matrix units know no bfloat16."""
    if capability < LEAST_CAPABILITY:
        needed, found = (".".join(map(str, one)) for one in (LEAST_CAPABILITY, capability))
        raise ConfigError(
            f"the kernels need a GPU of compute capability {needed} or more (A100, RTX 30 and later); "
            f"{name} has {found}; --device cpu serves without one"
        )


def _exactness(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> Exactness:
    """Raises ConfigError where it is asked for and can't be."""
    try:
        return exactness_of(weights.described(model), dtype, config.exact, buckets_for(config.max_rows))
    except NoExactKernelsError as error:
        raise ConfigError(f"{config.spelling('exact')} on can't be: {error}") from error


def _log_captures() -> Callable[[int, int], None]:
    """Logs each further quarter of the graphs captured, with the seconds since the first of them was begun, and the
    GPU's memory that they have taken."""
    log = structlog.get_logger("engine")
    shown = -1
    begun, free = 0.0, 0

    def progress(done: int, total: int) -> None:
        nonlocal shown, begun, free
        quarter = 4 * done // max(total, 1)
        if shown < 0:
            begun, free = time.monotonic(), torch.cuda.mem_get_info()[0]
        if quarter > shown:
            shown = quarter
            taken = free - torch.cuda.mem_get_info()[0]
            seconds = round(time.monotonic() - begun, 1)
            log.info("capturing", graphs=done, of_graphs=total, seconds=seconds, bytes=taken)

    return progress
