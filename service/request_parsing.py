"""Bytes that are not a message of the method's type end the call with INVALID_ARGUMENT, as any other bad input does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

MALFORMED_SENTENCE: Final = "the request's bytes are not a message of this method's type"

_Context = grpc.aio.ServicerContext[Any, Any]


class ParsingInterceptor(grpc.aio.ServerInterceptor):
    """Parses requests inside the call. The library would parse them before the call, and answer UNKNOWN with a class's
    name."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The method's handler, taking bytes."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                _stream_stream(handler), response_serializer=handler.response_serializer
            )
        wrap = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return wrap(_unary(handler), response_serializer=handler.response_serializer)


async def _decoded(handler: Any, data: bytes, context: _Context) -> Any:
    try:
        return handler.request_deserializer(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, MALFORMED_SENTENCE)


def _unary(handler: Any) -> Callable[[bytes, _Context], Awaitable[Any]]:
    inner = handler.unary_stream or handler.unary_unary  # coroutines, both: streams are written to the context

    async def serve(data: bytes, context: _Context) -> Any:
        return await inner(await _decoded(handler, data, context), context)

    return serve


def _stream_stream(handler: Any) -> Callable[[AsyncIterator[bytes], _Context], AsyncIterator[Any]]:
    async def serve(stream: AsyncIterator[bytes], context: _Context) -> AsyncIterator[Any]:
        requests = (await _decoded(handler, data, context) async for data in stream)
        async for response in handler.stream_stream(requests, context):
            yield response

    return serve
