"""The command line: `runahead`, `serve` and the other commands, `--version`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final, NamedTuple

from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.commands import engine_commands
from runahead.service.commands.ends import interruptible
from runahead.service.commands.shell_completion import SHELLS, completion_script
from runahead.service.settings import setting_flags, settings
from runahead.service.settings.cli_parser import EXIT_USAGE, Parser, parse
from runahead.service.version import full_version

_SERVERS: Final = ("serve", "kernels", "tune")
_CONNECTION: Final = "runahead.service.commands.client_channel"


class _Client(NamedTuple):
    """A command that calls a service. module: has `add_flags(parser)` and `run(arguments)`."""

    module: str
    help: str
    description: str


_CLIENTS: Final = {
    "generate": _Client(
        "runahead.service.commands.generate_command",
        "stream a completion from a running service to the terminal",
        "Streams a completion from a running service to the terminal.",
    ),
    "chat": _Client(
        "runahead.service.commands.chat_command",
        "talk with the instruct model of a running service",
        "Talks with the model of a running service, in the chat template of its checkpoint: a line is a "
        "message, and the model is given all that was said before. The temperature is 0, and an answer has at most "
        "1024 tokens, unless flags say otherwise. Without a terminal, lines come from standard input, and answers "
        "alone go to standard output.",
    ),
    "stats": _Client(
        "runahead.service.commands.stats_command",
        "show the figures of a running service",
        "Shows the figures of a running service whenever one has changed: in place on a terminal, else one "
        "time after the other. Where the service's port takes no more connections, its control port still answers.",
    ),
    "trace": _Client(
        "runahead.service.commands.trace_command",
        "show when host and device did what, launch by launch",
        "Prints how long host and device were at what for the newest launches of a running service, and "
        "writes it as a trace for Perfetto or as a picture. The service remembers so much without being asked to.",
    ),
    "abort": _Client(
        "runahead.service.commands.abort_command",
        "end requests of a running service",
        "Ends requests of a running service by their ids, and prints what became of each.",
    ),
    "bench": _Client(
        "runahead.service.commands.bench.command",
        "measure a running service under load",
        "Sends requests to a running service at random times, without waiting for the ones before, and "
        "prints what their clients saw: first token, gaps between messages, tokens a second, and the share of requests "
        "that met a goal. Prompts are random token ids, and answers have the length that is asked for.",
    ),
}


class _Version(argparse.Action):
    """Finds the version on demand: in a checkout that runs git."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"runahead {full_version()}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status, 2 for an unknown or invalid flag or setting."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser, commands = _parser(next((argument for argument in arguments if not argument.startswith("-")), ""))
    parsed = parse(parser, commands, arguments)
    if parsed.command in _SERVERS:
        return _with_settings(parsed)
    if parsed.command == "completion":
        actions = [action for command in commands.values() for action in command.actions]
        print(completion_script(parser, actions, parsed.shell))
        return 0
    interruptible()
    if parsed.command == "models":
        return engine_commands.list_models()
    from runahead.service.commands.client import run_client  # loads gRPC

    return run_client(parsed.command, import_module(_CLIENTS[parsed.command].module).run, parsed)


def _parser(command: str) -> tuple[Parser, dict[str, Parser]]:
    """Return the parser and its commands' parsers by name. command: the given one.

    Clients' flags come from the contract, whose module loads gRPC: the supervisor's process does without.
    """
    parser = Parser(prog="runahead", description="Generates tokens from a language model, over gRPC.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_servers(commands)
    for name, client in _CLIENTS.items():
        added = commands.add_parser(name, help=client.help, description=client.description)
        if command not in _SERVERS:
            import_module(client.module).add_flags(added)
            import_module(_CONNECTION).add_connection_flags(added)
    commands.add_parser(
        "models",
        help="list the architectures that are served",
        description="Lists the architectures that `runahead serve` takes, as `architectures` of a checkpoint's "
        "config.json has them, and models that are known to be of them.",
    )
    completion = commands.add_parser(
        "completion",
        help="print a script that completes commands and flags",
        description="Prints a script that completes commands, flags and their values.",
        epilog="For bash, add this line to ~/.bashrc: source <(runahead completion bash). zsh reads the script as the "
        "file _runahead in a folder of its fpath, fish as ~/.config/fish/completions/runahead.fish.",
    )
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    return parser, commands.choices


def _add_servers(commands: argparse._SubParsersAction[Parser]) -> None:
    serve = commands.add_parser(
        "serve",
        help="run the service",
        usage="runahead serve [--config FILE] [--SETTING VALUE ...]",
        description="Runs the service. Each setting is a flag, an environment variable and a key of the TOML file that "
        "--config names; a flag wins over the environment, the environment over the file.\n\n"
        "example:\n"
        "  runahead serve --model ~/models/qwen3-0.6b --port 50061\n"
        "  runahead generate 'Once upon a time' --url 127.0.0.1:50061",
    )
    setting_flags.add_flags(serve)
    kernels = commands.add_parser(
        "kernels",
        help="compile the kernels for this GPU that a start of the service needs",
        usage="runahead kernels [--config FILE] [--SETTING VALUE ...]",
        description="Compiles what `runahead serve` with the same flags, variables and file would compile on this GPU, "
        "into the folder that --kernel-cache names, and ends. Of the checkpoint only config.json is read. The other "
        "flags of `runahead serve` are accepted too, and change no kernel.\n\n"
        "example:\n"
        "  runahead kernels --model ~/models/qwen3-0.6b --kernel-cache /var/cache/kernels",
    )
    setting_flags.add_flags(kernels, setting_flags.changes_kernels)
    tune = commands.add_parser(
        "tune",
        help="find the fastest tilings of the kernels for this GPU and a model",
        usage="runahead tune [--config FILE] [--SETTING VALUE ...]",
        description="Times captured graphs of decode launches with random weights, with each product cut in other "
        "ways, and writes the fastest into the folder that --kernel-cache names, where later starts of `runahead "
        "serve` with that folder read them. No answer changes by a bit. Of the checkpoint only config.json is read.\n\n"
        "example:\n"
        "  runahead tune --model ~/models/qwen3-0.6b --kernel-cache /var/cache/kernels",
    )
    engine_commands.add_tune_flags(tune)
    setting_flags.add_flags(tune, setting_flags.changes_kernels)


def _with_settings(parsed: argparse.Namespace) -> int:
    from runahead.service.processes import server  # clients don't need these modules
    from runahead.service.settings import server_config  # clients don't need these modules

    try:
        chosen = settings.load_settings(vars(parsed), config_file=parsed.config)
        config = server_config.ServerConfig(engine=settings.engine_config(chosen), front_end=chosen.front_end)
    except (settings.SettingsError, ConfigError) as error:
        print(f"runahead {parsed.command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    if parsed.command == "serve":
        return server.run(config)
    interruptible()
    if parsed.command == "kernels":
        return engine_commands.compile_kernels(config)
    return engine_commands.tune(config, parsed)
