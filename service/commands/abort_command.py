"""`runahead abort`: ends requests by id, or all that the caller may end."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from runahead.service.commands.client import add_timeout_flag, one_call
from runahead.service.commands.ends import EXIT_FAILED
from runahead.service.commands.request_flags import UsageError
from runahead.v1 import control_pb2

_OUTCOME: Final = "ABORT_OUTCOME_"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags that choose the requests."""
    parser.add_argument("ids", nargs="*", metavar="ID", help="id of a request, or caller/id of somebody else's")
    parser.add_argument("--all", action="store_true", help="all requests that the caller may end")
    add_timeout_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print each request's id and outcome. Returns the exit status.

    0: each has ended, now or before. 1: the call failed, or an id is unknown. 2: a flag is invalid. 130: interrupted.
    """
    return _show(one_call(arguments, _request(arguments), lambda stub: stub.Abort))


def _show(response: control_pb2.AbortResponse) -> int:
    for result in response.results:
        print(result.request_id, control_pb2.AbortOutcome.Name(result.outcome).removeprefix(_OUTCOME))
    sys.stdout.flush()
    unknown = any(result.outcome == control_pb2.ABORT_OUTCOME_NOT_FOUND for result in response.results)
    return EXIT_FAILED if unknown else 0


def _request(arguments: argparse.Namespace) -> control_pb2.AbortRequest:
    """Make the request. Raises UsageError."""
    if bool(arguments.ids) == arguments.all:
        raise UsageError("give the ids of requests, or --all" + (", and not both" if arguments.all else ""))
    try:
        return control_pb2.AbortRequest(request_ids=arguments.ids, all=arguments.all or None)
    except ValueError as error:  # an invalid character
        raise UsageError("an id is not UTF-8") from error
