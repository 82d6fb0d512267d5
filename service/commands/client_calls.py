"""Calls of a client that makes one at a time, the open one of which may be ended from a signal's handler."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

import grpc

from runahead.service.commands.client_channel import Metadata
from runahead.v1 import generate_pb2, generation_service_pb2_grpc, model_pb2


class Cancelled(Exception):
    """`ClientCalls.cancel` has ended the call."""


class ClientCalls:
    """Each method raises grpc.RpcError, and Cancelled.

    timeout_s: seconds that a call may take; None: any.
    """

    def __init__(self, channel: grpc.Channel, metadata: Metadata, timeout_s: float | None) -> None:
        self._stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        self._options = {"timeout": timeout_s, "metadata": metadata}
        self._open: Any = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """Ends the open call, and every later one up to `resume`. From a signal's handler, too: gRPC's own lock can be
        taken again by the thread that has it."""
        self._is_cancelled = True
        if self._open is not None:
            self._open.cancel()

    def resume(self) -> None:
        """Calls are made again."""
        self._is_cancelled = False

    def model_info(self) -> model_pb2.GetModelInfoResponse:
        call = self._stub.GetModelInfo.future(model_pb2.GetModelInfoRequest(), **self._options)
        with self._opened(call):
            response: model_pb2.GetModelInfoResponse = call.result()
        return response

    def generate(self, request: generate_pb2.GenerateRequest) -> Generator[generate_pb2.GenerateResponse]:
        """The events of a stream. Whoever takes no more of them closes it."""
        with self._opened(self._stub.Generate(request, **self._options)) as call:
            yield from call

    @contextlib.contextmanager
    def _opened(self, call: Any) -> Iterator[Any]:
        """The call, which has ended when the body has, however that ends."""
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
