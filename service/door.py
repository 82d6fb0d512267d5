"""The way into every method of every service: a call is known until it ends, and its bytes become a message in here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from runahead.service.access import Access
from runahead.service.errors import invalid_argument, shutting_down, to_status
from runahead.service.guard import guarded
from runahead.service.limits import LIMITS
from runahead.service.wire_faults import wire_faults

_Context = grpc.aio.ServicerContext[Any, Any]


class OpenCalls:
    """The calls that are being served, so that a shutdown can end each of them with a status."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended = False

    @asynccontextmanager
    async def entered(self, context: _Context) -> AsyncIterator[None]:
        """Serves the body, or as much of it as there is until `end`."""
        task = asyncio.current_task()
        assert task is not None
        if self._ended:
            await context.abort_with_status(to_status(shutting_down()))
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._ended or context.cancelled():
                raise
            task.uncancel()
            try:
                await context.abort_with_status(to_status(shutting_down()))
            except grpc.aio.UsageError:
                return  # its status was on its way already
        finally:
            self._tasks.discard(task)

    async def end(self, within_s: float) -> None:
        """UNAVAILABLE, reason SHUTDOWN, for every call that comes, and for each open one that has not ended by itself
        `within_s` seconds later."""
        self._ended = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)
        for task in self._tasks:
            task.cancel()


class Door(grpc.aio.ServerInterceptor):
    """Wraps every method: who may not call is refused before anything is done for them.

    Requests are parsed inside the call. The library would parse them before the call, and answer UNKNOWN with a class's
    name.
    """

    def __init__(self, calls: OpenCalls, access: Access) -> None:
        self._calls = calls
        self._access = access

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The method's handler, taking bytes."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(self._nothing(method))
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._stream_stream(method, handler), response_serializer=handler.response_serializer
            )
        wrap = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return wrap(self._unary(method, handler), response_serializer=handler.response_serializer)

    @asynccontextmanager
    async def _entered(self, method: str, context: _Context, *, exists: bool = True) -> AsyncIterator[None]:
        async with self._calls.entered(context), guarded(context):
            self._access.admit(method, context, exists=exists)
            yield

    def _unary(self, method: str, handler: Any) -> Callable[[bytes, _Context], Awaitable[Any]]:
        inner = handler.unary_stream or handler.unary_unary  # coroutines, both: streams are written to the context

        async def serve(data: bytes, context: _Context) -> Any:
            async with self._entered(method, context):
                return await inner(_parsed(handler, data), context)

        return serve

    def _stream_stream(self, method: str, handler: Any) -> Callable[[AsyncIterator[bytes], _Context], Awaitable[None]]:
        async def serve(stream: AsyncIterator[bytes], context: _Context) -> None:
            async with self._entered(method, context):
                requests = (_parsed(handler, data) async for data in stream)
                async for response in handler.stream_stream(requests, context):
                    await context.write(response)

        return serve

    def _nothing(self, method: str) -> Callable[[AsyncIterator[bytes], _Context], Awaitable[None]]:
        async def refuse(stream: AsyncIterator[bytes], context: _Context) -> None:
            async with self._entered(method, context, exists=False):
                pass

        return refuse


def _parsed(handler: Any, data: bytes) -> Any:
    """Raises ServiceError (INVALID_ARGUMENT) naming the fields at fault."""
    try:
        return handler.request_deserializer(data)
    except DecodeError:
        message = handler.request_deserializer.__self__  # the class whose FromString this is
        raise invalid_argument(wire_faults(message.DESCRIPTOR, data, LIMITS.violations), "MALFORMED") from None
