"""An event loop whose time passes at once, and whose process can be stopped."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from runahead.service.engine.engine_client import SocketEngineClient
from tests.service.fake_engine import TIMEOUT_S, FakeEngine

Result = TypeVar("Result")
IMPATIENT_S = 0.3


class VirtualEvent(threading.Event):
    """Waits in no time, and adds up how long it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.waited_s += timeout or 0.0
        return super().wait(0)


class VirtualTime(selectors.DefaultSelector):
    """What an event loop waits with whose time passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        with asyncio.Runner(loop_factory=self._loop) as runner:
            return runner.run(work)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "nothing would ever end this wait"
            self._now_s += timeout
        return found

    def _loop(self) -> asyncio.AbstractEventLoop:
        event_loop = asyncio.SelectorEventLoop(self)
        event_loop.time = lambda: self._now_s  # type: ignore[method-assign]
        return event_loop


class Stoppable(selectors.DefaultSelector):
    """What an event loop of a process waits with that is stopped (SIGSTOP) for a while. Its wait is interrupted: when
    it goes on, the time is over and the wait brings nothing, although something has come."""

    def __init__(self) -> None:
        super().__init__()
        self.stops = 0
        self._stop_s = self._stopped_s = 0.0

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=self._loop) as runner:
            runner.run(work)

    async def stopped_for(self, seconds: float) -> None:
        """Returns when the process goes on."""
        self._stop_s = seconds
        await asyncio.sleep(0)  # the stop
        await asyncio.sleep(0)  # what was due meanwhile

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._stop_s:
            return super().select(timeout)
        assert super().select(TIMEOUT_S), "the engine has said something meanwhile"
        self._stopped_s, self._stop_s = self._stopped_s + self._stop_s, 0.0
        self.stops += 1
        return []

    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(self)
        awake_s = loop.time
        loop.time = lambda: awake_s() + self._stopped_s  # type: ignore[method-assign]
        return loop


def run(path: Path, body, stoppable: Stoppable | None = None) -> None:  # type: ignore[no-untyped-def]
    """Runs `body(client, engine)` with a connected client that is soon impatient."""

    async def connected() -> None:
        client = await SocketEngineClient.connect(path, silent_s=IMPATIENT_S)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await body(client, engine)
        finally:
            client.close("SHUTDOWN", "the test is over")
            await asyncio.sleep(0)

    engine = FakeEngine(path)
    try:
        (stoppable or Stoppable()).run(connected())
    finally:
        engine.close()
