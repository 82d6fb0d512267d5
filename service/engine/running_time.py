"""Time-outs that count only while the process that set them runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

LOOKS: Final = 8  # within a limit: what is too late is noticed at most so much of it late


@asynccontextmanager
async def running_timeout(limit_s: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`, for what others do: where this process was stopped meanwhile, or the whole machine stood
    still, that counts for an eighth of the limit at most. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def look(looks: int) -> None:
        nonlocal timer
        if looks < LOOKS:
            timer = loop.call_later(limit_s / LOOKS, look, looks + 1)
        else:
            timeout.reschedule(loop.time())

    async with asyncio.timeout(None) as timeout:
        look(0)
        try:
            yield
        finally:
            timer.cancel()
