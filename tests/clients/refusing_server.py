"""A server that refuses every call."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc


@dataclass
class RefusingServer(grpc.GenericRpcHandler):
    """Ends every call with one code, and keeps the headers of each attempt."""

    code: grpc.StatusCode
    attempts: list[dict[str, Any]] = field(default_factory=list)
    address: str = ""

    def __enter__(self) -> RefusingServer:
        self._server = grpc.server(ThreadPoolExecutor(4), handlers=[self])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=None).wait()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        self.attempts.append({"method": handler_call_details.method, **dict(handler_call_details.invocation_metadata)})
        return grpc.unary_stream_rpc_method_handler(self._refuse)

    def _refuse(self, _: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(self.code, "as it always does")
        yield b""  # never reached: this makes a stream of it
