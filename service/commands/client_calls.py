"""One call at a time, which a signal handler may cancel."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

import grpc

from runahead.service.commands.client_channel import Metadata
from runahead.v1 import generate_pb2, generation_service_pb2_grpc, model_pb2


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
