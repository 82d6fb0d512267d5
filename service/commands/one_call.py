"""A command that makes one call of a service, shows the answer and ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import grpc

from runahead.service.commands.client_channel import connection
from runahead.service.commands.client_failure import (
    EXIT_USAGE,
    describe_failure,
)
from runahead.service.commands.ends import EXIT_FAILED, EXIT_INTERRUPTED
from runahead.service.commands.request_flags import UsageError, seconds_of
from runahead.v1 import generation_service_pb2_grpc

_ANSWER_S: Final = 10.0

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def add_timeout_flag(parser: argparse.ArgumentParser) -> None:
    """How long the call may take."""
    parser.add_argument("--timeout", metavar="SECONDS", help="give up after this long (default: 10)")


def one_call(
    command: str,
    arguments: argparse.Namespace,
    asked: Callable[[argparse.Namespace], Asked],
    method: Callable[[Any], Callable[..., Answer]],
    show: Callable[[Answer], int],
) -> int:
    """Asks a service for what the flags say, and shows its answer. Returns the exit status.

    command: as messages name it. asked: the request that the flags describe; raises UsageError. method: of a stub.
    show: returns the exit status of an answer.
    """
    try:
        connected = connection(arguments)
        timeout_s = _ANSWER_S if arguments.timeout is None else seconds_of(arguments.timeout)
        request = asked(arguments)
    except UsageError as error:
        print(f"runahead {command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    with connected.channel as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        try:
            return show(method(stub)(request, timeout=timeout_s, metadata=connected.metadata))
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except grpc.RpcError as error:
            print(f"runahead {command}: {describe_failure(error, arguments.url)}", file=sys.stderr)
            return EXIT_FAILED
