"""Messages and exit statuses of failed client calls."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, Final

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from runahead.service.commands.ends import EXIT_FAILED, EXIT_INTERRUPTED
from runahead.service.commands.terminal_text import harmless
from runahead.service.commands.usage_error import UsageError

_NOT_CONNECTED: Final = "failed to connect"  # gRPC's words before the system's reason
_NOBODY: Final = ("Connection refused", "No such file or directory")

EXIT_USAGE: Final = 2


def run_client(command: str, run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a client's command and return its exit status. 1: a call failed. 2: a flag is invalid. 130: interrupted."""
    try:
        return run(arguments)
    except UsageError as error:
        sentence, status = str(error), EXIT_USAGE
    except grpc.RpcError as error:
        sentence, status = describe_failure(error, arguments.url), EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    print(harmless(f"runahead {command}: {sentence}"), file=sys.stderr)
    return status


def refused_fields(error: grpc.RpcError) -> list[str]:
    """Return the paths of fields that the server rejected."""
    status = rpc_status.from_call(error)
    violations = error_details_pb2.BadRequest()
    details = status.details if status else ()
    return [item.field for detail in details if detail.Unpack(violations) for item in violations.field_violations]


def describe_failure(error: grpc.RpcError, url: str) -> str:
    """Describe a failure: status, message, other rejected fields, and the flag for a token if the server requires
    one.
    """
    call: Any = error  # a stub's exception is both an error and its call
    if call.code() == grpc.StatusCode.UNAVAILABLE and (call.details() or "").startswith(_NOT_CONNECTED):
        if any(sign in call.details() for sign in _NOBODY):
            return f"no server answers at {url}; start one with `runahead serve`"
        return (
            f"no connection to a server at {url}: {call.details()}\nWhere the server has TLS, --tls or --ca FILE is "
            "needed, and where it has none, neither may be given. The port for metrics answers no such calls."
        )
    line = f"{call.code().name}: {call.details()}"
    status = rpc_status.from_call(call)
    for detail in status.details if status else ():
        violations = error_details_pb2.BadRequest()
        if detail.Unpack(violations):
            others = (item.description for item in violations.field_violations if item.description != call.details())
            line += "".join(f"\n  {sentence}" for sentence in others)
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.reason == "NO_CREDENTIALS":
            line += "\n  --token-file FILE sends the token in that file"
    return line
