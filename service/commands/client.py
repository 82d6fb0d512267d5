"""A command's calls of a service, and the sentence about a failed one."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final, TypeVar

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from runahead.service.commands.client_channel import Metadata, endpoint
from runahead.service.commands.ends import EXIT_FAILED, EXIT_INTERRUPTED, UsageError
from runahead.service.commands.request_flags import seconds_of
from runahead.service.commands.terminal_text import harmless
from runahead.v1 import generate_pb2, generation_service_pb2_grpc, model_pb2

_NOT_CONNECTED: Final = "failed to connect"  # gRPC's words before the system's reason
_NOBODY: Final = ("Connection refused", "No such file or directory")

EXIT_USAGE: Final = 2

_ANSWER_S: Final = 10.0

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


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


class Cancelled(Exception):
    """`ClientCalls.cancel` ended the call."""


class ClientCalls:
    """Makes calls. Methods raise grpc.RpcError and Cancelled.

    timeout_s: of a call in seconds; None: none.
    """

    def __init__(self, channel: grpc.Channel, metadata: Metadata, timeout_s: float | None) -> None:
        self._stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        self._options = {"timeout": timeout_s, "metadata": metadata}
        self._open: Any = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """Cancel the open call and every later one until `resume`. Safe in a signal handler: gRPC's lock is
        reentrant.
        """
        self._is_cancelled = True
        if self._open is not None:
            self._open.cancel()

    def resume(self) -> None:
        """Allow calls again."""
        self._is_cancelled = False

    def model_info(self) -> model_pb2.GetModelInfoResponse:
        call = self._stub.GetModelInfo.future(model_pb2.GetModelInfoRequest(), **self._options)
        with self._opened(call):
            response: model_pb2.GetModelInfoResponse = call.result()
        return response

    def generate(self, request: generate_pb2.GenerateRequest) -> Generator[generate_pb2.GenerateResponse]:
        """Yield a stream's events. Close it to stop early."""
        with self._opened(self._stub.Generate(request, **self._options)) as call:
            yield from call

    @contextlib.contextmanager
    def _opened(self, call: Any) -> Iterator[Any]:
        """Register a call for cancellation, and end it with the body."""
        self._open = call
        if self._is_cancelled:  # before the handler could see this call
            call.cancel()
        try:
            yield call
        except (grpc.RpcError, grpc.FutureCancelledError):
            if self._is_cancelled:
                raise Cancelled from None
            raise
        finally:
            self._open = None
            call.cancel()


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
