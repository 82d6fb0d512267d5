"""Detects a stopped or stuck engine by its silence, and time-outs that count only while the process runs.

The engine sends a message in every loop turn that is long enough.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import structlog

from runahead.runtime.wire.messages import PROTOCOL_VERSION, Hello, encode_frame
from runahead.service.engine.request_stream import EngineLostError

CHECKS: Final = 8  # checks within a limit: a time-out is at most one check late

# Heartbeats come every 0.5 s, or up to 0.25 s later while the loop waits. After two missing ones the service stops
# being ready, within 2 s.
SILENT_S: Final = 1.5

log = structlog.get_logger(__name__)


@asynccontextmanager
async def running_timeout(limit_s: float) -> AsyncIterator[None]:
    """Like `asyncio.timeout`, but time in which this process or the machine was stopped counts for at most an eighth of
    the limit. Raises TimeoutError.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def check(count: int) -> None:
        nonlocal timer
        if count < CHECKS:
            timer = loop.call_later(limit_s / CHECKS, check, count + 1)
        else:
            timeout.reschedule(loop.time())

    async with asyncio.timeout(None) as timeout:
        check(0)
        try:
            yield
        finally:
            timer.cancel()


def stuck_after_s(launch_timeout_s: float) -> float:
    """Return the seconds of silence after which an engine is stuck for good. An engine that can still act on its launch
    time-out has logged its state before that.
    """
    return 1.25 * (launch_timeout_s + 2.0)


class Pulse:
    """A timer on the running event loop. limit_s: of silence. tell: called with True after that silence, at most an
    eighth later, and with False when the engine is heard again.

    Counts checks instead of time, so a late check of a busy or stopped process counts once. After a stop a check may
    run before the messages received meanwhile.
    """

    def __init__(self, limit_s: float, tell: Callable[[bool], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._tell = tell
        self._was_heard = False  # since the last check
        self._quiet_checks = 0  # in a row
        self.is_silent = False
        self._timer = self._set_timer()

    def heard(self) -> None:
        """Record a message of the engine."""
        self._was_heard = True
        if self.is_silent:
            self.is_silent = False
            self._timer = self._set_timer()
            self._tell(False)

    def end(self) -> None:
        """Stop telling."""
        self._timer.cancel()

    def _set_timer(self) -> asyncio.TimerHandle:
        return self._loop.call_later(self._limit_s / CHECKS, self._check)

    def _check(self) -> None:
        self._quiet_checks = 0 if self._was_heard else self._quiet_checks + 1
        self._was_heard = False
        if self._quiet_checks < CHECKS:
            self._timer = self._set_timer()
        else:
            self.is_silent = True
            self._tell(True)


class EngineWatch(asyncio.Protocol):
    """A connection to the engine that only watches for its silence."""

    def __init__(self, limit_s: float) -> None:
        self._stuck = asyncio.Event()
        self._pulse = Pulse(limit_s, lambda is_silent: self._stuck.set() if is_silent else None)
        self._transport: asyncio.BaseTransport | None = None

    @classmethod
    async def connect(cls, path: Path, limit_s: float) -> EngineWatch:
        """Connect. limit_s: of silence. Raises EngineLostError if there is no engine at `path`."""
        watch = cls(limit_s)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: watch, os.fspath(path))
        except OSError as error:
            watch.close()
            raise EngineLostError("CONNECT", f"the engine could not be reached: {error}") from error
        return watch

    async def wait_stuck(self) -> None:
        """Return when the engine was silent for too long. Never returns if it has ended."""
        await self._stuck.wait()

    def close(self) -> None:
        """Idempotent."""
        self._pulse.end()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # ------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(encode_frame(Hello(PROTOCOL_VERSION)))

    def data_received(self, data: bytes) -> None:
        self._pulse.heard()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pulse.end()
        if self._transport is not None:  # not closed by this end
            log.warning("engine_unwatched", why=str(exc) if exc is not None else "the engine has closed the connection")
