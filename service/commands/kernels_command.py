"""`runahead kernels`: starts the engine until it is ready, which compiles its kernels into the cache."""

from __future__ import annotations

import asyncio
import sys
from typing import Final

import msgspec

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig, check_config
from runahead.service.commands.ends import EXIT_INTERRUPTED
from runahead.service.processes.checkpoint_check import check_checkpoint
from runahead.service.processes.children import EngineProcess, EngineStartError
from runahead.service.settings.server_config import EXIT_CANNOT_START, EXIT_OK, ServerConfig

_STOP_S: Final = 30.0


def run(config: ServerConfig) -> int:
    """Compile the kernels. Returns the exit code: 0, 2 if the engine could not start (a sentence on standard error says
    why), 130 if interrupted.
    """
    try:
        engine = _checked(config.engine)
        code = asyncio.run(_start_and_stop(engine, config))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (ConfigError, CheckpointError, EngineStartError) as error:
        print(f"runahead kernels: {error}", file=sys.stderr, flush=True)
        return EXIT_CANNOT_START
    return EXIT_OK if code == 0 else EXIT_CANNOT_START


def _checked(config: EngineConfig) -> EngineConfig:
    """Return the configuration for a GPU with random weights, whose values do not affect kernels. Raises
    ConfigError.
    """
    check_config(config, config.spelling)
    if config.device == "cpu":
        raise ConfigError(f"{config.spelling('device')} cpu needs no kernels compiled; cuda does")
    on_gpu = msgspec.structs.replace(config, device="cuda", load_format="dummy")
    check_config(on_gpu, config.spelling)
    return on_gpu


async def _start_and_stop(engine: EngineConfig, config: ServerConfig) -> int:
    """Start and stop the engine. Returns its exit code. Raises CheckpointError and EngineStartError."""
    await check_checkpoint(engine)
    started = await EngineProcess.start(engine, config.front_end.log)
    return await started.stop(_STOP_S)
