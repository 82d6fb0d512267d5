"""`runahead tune`: times tilings of the decode kernels on this GPU and keeps the fastest."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Final

import msgspec

from runahead.runtime.wire.engine_config import ConfigError, TuneOrder, check_config
from runahead.service.commands.ends import EXIT_INTERRUPTED
from runahead.service.settings.server_config import EXIT_CANNOT_START, EXIT_OK, ServerConfig

TUNE_MODULE: Final = "runahead.runtime.process.tune"
MOST_ROWS: Final = 64  # above this products have kernels without such tilings
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
_SECONDS: Final = 900.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags beside the settings'."""
    parser.add_argument(
        "--rows", type=_rows, default=_ROWS, metavar="N,N,...",
        help=f"rows of the launches that are tuned, each 1 to {MOST_ROWS} [default {','.join(map(str, _ROWS))}]",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=_SECONDS, metavar="S",
        help=f"try nothing more after so many seconds [default {_SECONDS:.0f}]",
    )  # fmt: skip


def run(config: ServerConfig, parsed: argparse.Namespace) -> int:
    """Tune. Returns the exit code: 0, 2 if nothing could be tuned (a sentence on standard error says why), 130 if
    interrupted.
    """
    engine = config.engine
    try:
        if engine.device == "cpu":
            raise ConfigError(f"{engine.spelling('device')} cpu has no kernels to tune; cuda has")
        engine = msgspec.structs.replace(engine, device="cuda")
        check_config(engine, engine.spelling)
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


def _rows(text: str) -> tuple[int, ...]:
    """Parse row counts. Raises ArgumentTypeError."""
    numbers = text.split(",")
    if not all(number.isdecimal() and 1 <= int(number) <= MOST_ROWS for number in numbers):
        raise argparse.ArgumentTypeError(f"must be numbers from 1 to {MOST_ROWS}, by commas, and is {text!r}")
    return tuple(sorted(set(map(int, numbers))))
