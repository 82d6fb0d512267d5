"""Keeps a process running: restarts it after its death, and ends it when it hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from runahead.runtime.process_end import end_fields
from runahead.service.processes.front_end_process import FrontEndProcess, FrontEndStartError

BACK_OFF_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # before each start, in a row of quick deaths
SERVED_S: Final = 30.0  # after which a death does not count as a failed start
SILENT_S: Final = 15.0  # its event loop does nothing that takes a hundredth of this

log = structlog.get_logger(__name__)


class Restarts:
    """Restart delays of one front end."""

    def __init__(self) -> None:
        self._deaths = 0  # in a row

    def died(self, served_s: float) -> float | None:
        """Record a death after this time of service. Returns the seconds before the restart, or None after too many
        deaths.
        """
        self._deaths = 1 if served_s >= SERVED_S else self._deaths + 1
        return BACK_OFF_S[self._deaths - 1] if self._deaths <= len(BACK_OFF_S) else None


class Keeper:
    """Keeps one process running. kind: its name in the log, beside `named`. start: starts it and returns when it
    serves; raises FrontEndStartError. cleared: called when it serves no more. is_over: the service is ending.
    """

    def __init__(
        self,
        kind: str,
        start: Callable[[], Awaitable[FrontEndProcess]],
        cleared: Callable[[], None],
        is_over: Callable[[], bool],
        **named: object,
    ) -> None:
        self._kind = kind
        self._start = start
        self._cleared = cleared
        self._is_over = is_over
        self._named = named

    async def keep(self, process: FrontEndProcess) -> None:
        """Keep this serving process running. Returns when it is given up."""
        restarts, loop = Restarts(), asyncio.get_running_loop()
        began, has_begun = loop.time(), True
        while True:
            if has_begun:
                exit_code = await self._end_of(process)
                self._cleared()
                if self._is_over():
                    return  # which is the reason
                log.error(f"{self._kind}_died", **end_fields(exit_code), **self._named)
            delay_s = restarts.died(loop.time() - began if has_begun else 0.0)
            if delay_s is None:
                log.error(f"{self._kind}_given_up", **self._named)
                return
            await asyncio.sleep(delay_s)
            try:
                process = await self._start()
                began, has_begun = loop.time(), True
                log.info(f"{self._kind}_started_again", **self._named)
            except (FrontEndStartError, OSError) as error:
                has_begun = False
                self._cleared()
                log.error(f"{self._kind}_not_started", why=str(error), **self._named)

    async def _end_of(self, process: FrontEndProcess) -> int:
        """Wait for its exit code. A stuck process is ended."""
        ended = asyncio.ensure_future(process.wait())
        stuck = asyncio.ensure_future(process.wait_stuck(SILENT_S))
        try:
            await asyncio.wait({ended, stuck}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                log.error(f"{self._kind}_stuck", pid=process.pid, silent_s=SILENT_S)
                await process.kill()
            return await ended
        finally:
            ended.cancel()
            stuck.cancel()
