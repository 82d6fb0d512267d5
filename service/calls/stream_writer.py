"""Writes the events of one stream and detects a client that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from runahead.service.engine.pulse import CHECKS
from runahead.service.engine.request_stream import StalledReaderError

_Context = grpc.aio.ServicerContext[Any, Any]


class StreamWriter:
    """Writes the current call's stream, as a context manager around everything that the call holds.

    A write ends when the transport takes its bytes, which depends on the client's reads. A write longer than
    `stalled_s` seconds raises StalledReaderError; its rest stays in the library, which can't reset a call, until the
    client reads it or the connection ends.
    """

    def __init__(self, context: _Context, stalled_s: float) -> None:
        self._context = context
        self._stalled_s = stalled_s
        self._loop = asyncio.get_running_loop()
        self._headers: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._checks: int | None = None  # checks of the current write
        self._stalled = False
        task = asyncio.current_task()
        assert task is not None
        self._task = task

    async def __aenter__(self) -> StreamWriter:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """The writer's resources are released by now, so the call's status can wait behind its headers."""
        if self._timer is not None:
            self._timer.cancel()
        if self._headers is not None and isinstance(error, Exception):
            await asyncio.wait([self._headers])

    async def begin(self, headers: Sequence[tuple[str, str]] = ()) -> None:
        """Send the headers, with these ones, before any message: a client that takes no message takes headers, and only
        then can a status end the call. Raises StalledReaderError.
        """
        self._set_timer()
        self._headers = asyncio.ensure_future(self._context.send_initial_metadata(tuple(headers)))
        self._headers.add_done_callback(lambda headers: headers.cancelled() or headers.exception())
        await self._take(asyncio.shield(self._headers))

    def write(self, event: Message) -> Awaitable[None]:
        """Write an event; done when the transport has it. Raises StalledReaderError."""
        return self._take(self._context.write(event))

    async def _take(self, writing: Awaitable[None]) -> None:
        self._checks = 0
        try:
            await writing
        except asyncio.CancelledError:
            if not self._stalled:
                raise
            self._task.uncancel()
            raise StalledReaderError(self._stalled_s) from None
        finally:
            self._checks = None

    def _set_timer(self) -> None:
        """Set the stream's one timer, which writes do not touch."""
        self._timer = self._loop.call_later(self._stalled_s / CHECKS, self._check)

    def _check(self) -> None:
        """Count checks of a write, and end it after more than CHECKS: the first may come at once, and time in which the
        process was stopped counts as one.
        """
        if self._checks is not None:
            self._checks += 1
        if self._checks is None or self._checks <= CHECKS:
            self._set_timer()
        else:
            self._stalled = True
            self._task.cancel()
