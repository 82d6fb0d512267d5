"""The process of `runahead tune`: `python -m runahead.runtime.process.tune`.

Standard input is JSON, a `TuneOrder`; standard output gets a line for each number of rows. Exit codes: 0, or 2 with a
sentence on standard error.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from runahead.runtime.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.read_config import load_config
from runahead.runtime.process.device_choice import check_gpu
from runahead.runtime.process.parts import check_model, dtype_of, holds_quantized
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig, TuneOrder


def main() -> int:
    """Tune, and return the exit code."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=TuneOrder)
    try:
        _tune(order.config, order.rows, order.seconds)
    except (ConfigError, CheckpointError, OSError) as error:
        print(f"runahead tune: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _tune(config: EngineConfig, rows: tuple[int, ...], seconds: float) -> None:
    """Tune decode launches of these row counts. Raises ConfigError, CheckpointError, and OSError if the table can't be
    written.
    """
    if not torch.cuda.is_available():
        raise ConfigError("it needs a CUDA GPU, and torch finds none")
    device = torch.cuda.current_device()
    check_gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    checkpoint = open_checkpoint(Path(config.model))
    described = load_config(checkpoint)
    check_model(config, described)
    check_tunable(config, checkpoint, described)
    dtype = dtype_of(config, described)
    if dtype != torch.bfloat16:
        raise ConfigError(f"its kernels are for bfloat16, and {config.spelling('dtype')} says {dtype}")
    from runahead.runtime.programs.cuda.program import keep_kernels, use_tuned
    from runahead.runtime.programs.cuda.tuner import tune

    keep_kernels(config.kernel_cache, config.spelling("kernel_cache"))
    use_tuned()
    tune(described, dtype, rows, seconds, config.tensor_parallel)


def check_tunable(config: EngineConfig, checkpoint: Checkpoint, described: ModelConfig) -> None:
    """Raises ConfigError for a model whose matrices stay quantized on a GPU: their products have no table of
    tilings."""
    if holds_quantized(config, checkpoint, described):
        raise ConfigError(
            f"matrices of {config.model} stay quantized on a GPU, and products with them have fixed tilings; "
            "serve the model as it is"
        )


if __name__ == "__main__":
    sys.exit(main())
