"""A single call for a command that shows its answer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final, TypeVar

from runahead.service.commands.client_channel import endpoint
from runahead.service.commands.request_flags import seconds_of
from runahead.v1 import generation_service_pb2_grpc

_ANSWER_S: Final = 10.0

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def add_timeout_flag(parser: argparse.ArgumentParser) -> None:
    """Add the call's time-out."""
    parser.add_argument("--timeout", metavar="SECONDS", help="give up after this long (default: 10)")


def one_call(
    arguments: argparse.Namespace,
    request: Asked,
    method: Callable[[Any], Callable[..., Answer]],
) -> Answer:
    """Make the call and return its answer. method: of a stub. Raises UsageError and grpc.RpcError."""
    server = endpoint(arguments)
    timeout_s = _ANSWER_S if arguments.timeout is None else seconds_of(arguments.timeout)
    with server.channel() as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        return method(stub)(request, timeout=timeout_s, metadata=server.metadata)
