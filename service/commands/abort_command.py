"""`runahead abort`: ends requests by their ids, or all that the caller may end."""

from __future__ import annotations

import argparse
import sys
from typing import Final

import grpc

from runahead.service.commands.client_channel import connection
from runahead.service.commands.client_failure import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    describe_failure,
    nobody_reads,
)
from runahead.service.commands.request_flags import UsageError, seconds_of
from runahead.v1 import control_pb2, generation_service_pb2_grpc

_ANSWER_S: Final = 10.0
_OUTCOME: Final = "ABORT_OUTCOME_"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which requests."""
    parser.add_argument("ids", nargs="*", metavar="ID", help="id of a request, or caller/id of somebody else's")
    parser.add_argument("--all", action="store_true", help="all requests that the caller may end")
    parser.add_argument("--timeout", metavar="SECONDS", help="give up after this long (default: 10)")


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each request: its id and what became of it. Returns the exit status.

    0: each has ended, now or before. 1: the call failed, or an id is not known. 2: a flag is invalid. 130: interrupted.
    """
    try:
        connected = connection(arguments)
        timeout_s = _ANSWER_S if arguments.timeout is None else seconds_of(arguments.timeout)
        request = _request(arguments)
    except UsageError as error:
        print(f"runahead abort: {error}", file=sys.stderr)
        return EXIT_USAGE
    with connected.channel as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        try:
            response = stub.Abort(request, timeout=timeout_s, metadata=connected.metadata)
            for result in response.results:
                print(result.request_id, control_pb2.AbortOutcome.Name(result.outcome).removeprefix(_OUTCOME))
            sys.stdout.flush()
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            return nobody_reads()
        except grpc.RpcError as error:
            print(f"runahead abort: {describe_failure(error, arguments.url)}", file=sys.stderr)
            return EXIT_FAILED
    unknown = any(result.outcome == control_pb2.ABORT_OUTCOME_NOT_FOUND for result in response.results)
    return EXIT_FAILED if unknown else 0


def _request(arguments: argparse.Namespace) -> control_pb2.AbortRequest:
    """Raises UsageError."""
    if bool(arguments.ids) == arguments.all:
        raise UsageError("give the ids of requests, or --all" + (", and not both" if arguments.all else ""))
    try:
        return control_pb2.AbortRequest(request_ids=arguments.ids, all=arguments.all or None)
    except ValueError as error:  # a character that no text may hold
        raise UsageError("an id is not UTF-8") from error
