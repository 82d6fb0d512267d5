"""The command line: `runahead serve`, `runahead generate`, `runahead --version`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from service import generate, settings
from service.version import full_version

EXIT_USAGE: Final = 2


class _Parser(argparse.ArgumentParser):
    """Answers a wrong flag with one sentence, not with a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Finds the version out when it is wanted, and not before: a checkout is asked for its commit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"runahead {full_version()}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status. 2: a flag or a setting is unknown or can't be."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.command == "serve":
        return _serve(parsed)
    return generate.run(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="runahead", description="Generates tokens from a language model, over gRPC.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="run the service",
        description="Runs the service. Each setting is a flag, an environment variable and a key of the TOML file that "
        "--config names; a flag wins over the environment, the environment over the file.",
        allow_abbrev=False,
    )
    settings.add_flags(serve)
    client = commands.add_parser(
        "generate",
        help="stream a completion from a running service to the terminal",
        description="Streams a completion from a running service to the terminal.",
        allow_abbrev=False,
    )
    generate.add_flags(client)
    return parser


def _serve(parsed: argparse.Namespace) -> int:
    from service.server import ServerConfig, run  # a client has no use for what it loads

    try:
        chosen = settings.load_settings(vars(parsed), config_file=parsed.config)
        config = ServerConfig(
            engine=settings.engine_config(chosen),
            tokenizer=chosen.tokenizer,
            host=chosen.host,
            port=chosen.port,
            insecure=chosen.insecure,
            max_streams=chosen.max_streams,
            log_level=chosen.log_level,
            shutdown_grace_s=chosen.shutdown_grace_s,
        )
    except settings.SettingsError as error:
        print(f"runahead serve: {error}", file=sys.stderr)
        return EXIT_USAGE
    return run(config)
