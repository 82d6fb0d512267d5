"""Time-outs that count only while the process runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

CHECKS: Final = 8  # checks within a limit: a time-out is at most one check late


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
