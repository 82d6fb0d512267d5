"""`runahead models`, `runahead kernels` and `runahead tune`: each runs a process of the engine's packages."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from typing import Final

import msgspec

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig, TuneOrder, check_config
from runahead.service.commands.ends import EXIT_INTERRUPTED
from runahead.service.settings.server_config import EXIT_CANNOT_START, EXIT_OK, ServerConfig

_LISTING: Final = "runahead.runtime.models"
TUNE_MODULE: Final = "runahead.runtime.process.tune"
MOST_ROWS: Final = 64  # above this products have kernels without tilings
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
_SECONDS: Final = 900.0
_STOP_S: Final = 30.0


def list_models() -> int:
    """List the supported architectures. Returns the process's exit code."""
    done = subprocess.run([sys.executable, "-P", "-m", _LISTING], stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    return done.returncode


def compile_kernels(config: ServerConfig) -> int:
    """Start the engine with random weights, whose values do not affect kernels, until it is ready: that compiles its
    kernels into the cache. Returns the exit code: 0, 2 if the engine could not start (a sentence on standard error says
    why), 130 if interrupted.
    """
    from runahead.service.processes.checkpoint_check import check_checkpoint  # clients don't need these modules
    from runahead.service.processes.children import EngineProcess, EngineStartError  # clients don't need these modules

    async def start_and_stop(engine: EngineConfig) -> int:
        await check_checkpoint(engine)
        started = await EngineProcess.start(engine, config.front_end.log)
        return await started.stop(_STOP_S)

    try:
        engine = _on_gpu(config.engine, "needs no kernels compiled; cuda does", load_format="dummy")
        code = asyncio.run(start_and_stop(engine))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (ConfigError, CheckpointError, EngineStartError) as error:
        print(f"runahead kernels: {error}", file=sys.stderr, flush=True)
        return EXIT_CANNOT_START
    return EXIT_OK if code == 0 else EXIT_CANNOT_START


def add_tune_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags beside the settings'."""
    parser.add_argument(
        "--rows", type=_rows, default=_ROWS, metavar="N,N,...",
        help=f"rows of the launches that are tuned, each 1 to {MOST_ROWS} [default {','.join(map(str, _ROWS))}]",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=_SECONDS, metavar="S",
        help=f"try nothing more after so many seconds [default {_SECONDS:.0f}]",
    )  # fmt: skip


def tune(config: ServerConfig, parsed: argparse.Namespace) -> int:
    """Time tilings of the decode kernels on this GPU and keep the fastest. Returns the exit code: 0, 2 if nothing could
    be tuned (a sentence on standard error says why), 130 if interrupted.
    """
    try:
        engine = _on_gpu(config.engine, "has no kernels to tune; cuda has")
    except ConfigError as error:
        print(f"runahead tune: {error}", file=sys.stderr, flush=True)
        return EXIT_CANNOT_START
    order = TuneOrder(engine, parsed.rows, parsed.seconds)
    command = [sys.executable, "-P", "-m", TUNE_MODULE]
    try:
        code = subprocess.run(command, input=msgspec.json.encode(order), check=False).returncode
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_OK if code == 0 else EXIT_CANNOT_START


def _on_gpu(config: EngineConfig, why_not: str, **changes: str) -> EngineConfig:
    """Return the configuration for a GPU, with these changes. why_not: the end of a sentence about a CPU. Raises
    ConfigError.
    """
    if config.device == "cpu":
        raise ConfigError(f"{config.spelling('device')} cpu {why_not}")
    on_gpu = msgspec.structs.replace(config, device="cuda", **changes)
    check_config(on_gpu, config.spelling)
    return on_gpu


def _rows(text: str) -> tuple[int, ...]:
    """Parse row counts. Raises ArgumentTypeError."""
    numbers = text.split(",")
    if not all(number.isdecimal() and 1 <= int(number) <= MOST_ROWS for number in numbers):
        raise argparse.ArgumentTypeError(f"must be numbers from 1 to {MOST_ROWS}, by commas, and is {text!r}")
    return tuple(sorted(set(map(int, numbers))))
