"""The command: flags, a run for each rate, output. The client package calls `main`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import grpc

from runahead.service.commands.bench import figures as of_run
from runahead.service.commands.bench.calls import Lengths, planned
from runahead.service.commands.bench.calls import run as run_calls
from runahead.service.commands.client_channel import Endpoint, add_connection_flags, endpoint
from runahead.service.commands.ends import UsageError
from runahead.v1 import generation_service_pb2_grpc, model_pb2

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
_ASK_S: Final = 10.0
_STREAMS: Final = 500  # of one connection, at most
_MOST_CHANNELS: Final = 16


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags for the load and the goal."""
    parser.add_argument(
        "--rate",
        default="1",
        metavar="N[,N...]",
        help="requests a second, a run for each; 0: all at once (%(default)s)",
    )
    parser.add_argument("--requests", default="100", metavar="N", help="of each run (%(default)s)")
    parser.add_argument("--prompt-tokens", default="400", metavar="N", help="median length of prompts (%(default)s)")
    parser.add_argument("--output-tokens", default="125", metavar="N", help="median length of answers (%(default)s)")
    parser.add_argument(
        "--spread", default="0.7", metavar="SIGMA", help="of lengths, which are lognormal; 0: all equal (%(default)s)"
    )
    parser.add_argument("--seed", default="77", metavar="N", help="of times, lengths and prompts (%(default)s)")
    parser.add_argument(
        "--good-first-token-ms", default="200", metavar="MS", help="a good request's first token (%(default)s)"
    )
    parser.add_argument(
        "--good-token-ms", default="25", metavar="MS", help="its mean time a token after that (%(default)s)"
    )
    parser.add_argument("--timeout", metavar="SECONDS", help="give a request up after this long")
    parser.add_argument("--json", action="store_true", help="print a JSON object a run in place of the table")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark. Returns the exit status: 0: requests finished. 1: the service is not available, or no request
    finished. 2: a flag is invalid. 130: interrupted.
    """
    return asyncio.run(_run(_Asked(arguments), endpoint(arguments), arguments.json))


def main(arguments: Sequence[str] | None = None) -> int:
    """`runahead-bench`: the command as a program."""
    about = "Measures a running service under load; docs/bench.md says how."
    parser = argparse.ArgumentParser("runahead-bench", description=about, allow_abbrev=False)
    add_flags(parser)
    add_connection_flags(parser)
    flags = parser.parse_args(arguments)
    try:
        return run(flags)
    except UsageError as error:
        print(f"runahead bench: {error}", file=sys.stderr)
        return EXIT_USAGE
    except grpc.aio.AioRpcError as error:
        print(f"runahead bench: {flags.url}: {error.code().name}: {error.details()}", file=sys.stderr)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_FAILED


class _Asked:
    """Parsed flags. Raises UsageError."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.rates = [_number("rate", part, 0, 1e6) for part in flags.rate.split(",")]
        self.requests = _whole("requests", flags.requests, 1, 1_000_000)
        spread = _number("spread", flags.spread, 0, 5)
        self.prompts = Lengths(_whole("prompt_tokens", flags.prompt_tokens, 1, 1 << 22), spread)
        self.answers = Lengths(_whole("output_tokens", flags.output_tokens, 1, 1 << 20), spread)
        self.seed = _whole("seed", flags.seed, 0, (1 << 63) - 1)
        self.goal = of_run.Goal(
            _number("good_first_token_ms", flags.good_first_token_ms, 0, 1e9),
            _number("good_token_ms", flags.good_token_ms, 0, 1e9),
        )
        self.timeout_s = None if flags.timeout is None else _number("timeout", flags.timeout, 0.001, 1e9)


async def _run(asked: _Asked, server: Endpoint, as_json: bool) -> int:
    """Run each rate. Raises grpc.aio.AioRpcError if the service does not answer GetModelInfo."""
    count = min(_MOST_CHANNELS, 1 + asked.requests // _STREAMS)
    channels = [server.aio_channel() for _ in range(count)]
    finished = 0
    try:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channels[0])
        model = await stub.GetModelInfo(model_pb2.GetModelInfoRequest(), timeout=_ASK_S, metadata=server.metadata)
        if not as_json:
            print(f"{server.url}: {model.model}, {asked.requests} requests a run")
            print(of_run.head(), flush=True)
        for rate in asked.rates:
            requests = planned(
                rate, asked.requests, asked.prompts, asked.answers,
                vocab=model.vocab_size, context=model.context_length, seed=asked.seed,
            )  # fmt: skip
            outcomes, seconds = await run_calls(channels, requests, server.metadata, asked.timeout_s)
            found = of_run.figures(rate, outcomes, seconds, asked.goal)
            finished += found.requests - found.failed
            print(json.dumps(asdict(found)) if as_json else of_run.row(found), flush=True)
            if found.failure and not as_json:
                print(f"  {found.failed} failed, the first with {found.failure}")
            if (found.late_ms_p99 or 0.0) > asked.goal.first_token_ms / 10:
                late = f"requests were sent up to {found.late_ms_p99} ms late: this client is the limit"
                print(f"runahead bench: {late}", file=sys.stderr)
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
    return 0 if finished else EXIT_FAILED


def _number(flag: str, text: str, least: float, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not least <= number <= most:  # also false for NaN
        raise UsageError.of(flag, f"a number from {least:g} to {most:.0f}", text)
    return number


def _whole(flag: str, text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise UsageError.of(flag, f"a whole number from {least} to {most}", text)
    return number
