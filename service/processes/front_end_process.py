"""A front end, or the side server, as a process of its own, a child of the supervisor: the supervisor's side of it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from runahead.runtime.process_end import described
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.service.engine.running_time import running_timeout
from runahead.service.log.library_lines import LibraryLines
from runahead.service.processes.interrupts import started
from runahead.service.settings.settings import FrontEndSettings

FRONT_END_MODULE: Final = "runahead.service.servers.serve_front_end"
SIDE_MODULE: Final = "runahead.service.servers.serve_side"
# -P: nothing in the current directory can stand in for a module.
COMMAND: Final = (sys.executable, "-P", "-m", FRONT_END_MODULE)
SIDE_COMMAND: Final = (sys.executable, "-P", "-m", SIDE_MODULE)

LOADED: Final = b"loaded"
ALIVE: Final = b"alive"
_LAST_LINES_S: Final = 1.0
ALIVE_S: Final = 1.0  # from one time that it says so to the next
START_S: Final = 60.0  # for each of the two steps of a start, of which neither takes more than some seconds
DRAIN: Final = b"drain\n"
END: Final = b"end\n"


class FrontEndOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of its standard input.

    index: which one it is, from 0. board: the descriptor of the memory that they share. version: of the server.
    linger_s: how long it says that it is not serving after the engine was lost, before it ends. library_lines: the
    descriptor that its libraries' standard error is to be; set when it is started.
    """

    engine: EngineConfig
    settings: FrontEndSettings
    index: int
    board: int
    version: str
    linger_s: float
    library_lines: int = -1

    @property
    def name(self) -> str:
        """The process's name in logs and figures."""
        return f"front_end_{self.index + 1}"


class SideOrders(FrontEndOrders, frozen=True, kw_only=True):
    """The first line of the side server's. health_port, metrics_port: to listen on from then on; 0 is any,
    NO_PORT none."""

    health_port: int
    metrics_port: int

    @property
    def name(self) -> str:
        return "side_server"


class ServeOrder(msgspec.Struct, frozen=True):
    """The second line: where the engine listens, and the port to serve on; 0 is any."""

    socket: str
    port: int


class FrontEndStartError(RuntimeError):
    """A front end has ended before it served, and has said why on standard error; or it has said nothing for so long
    that it was ended. exit_code: None then."""

    def __init__(self, exit_code: int | None) -> None:
        if exit_code is None:
            super().__init__(f"a front end said nothing for {START_S:g} s while it started, and was ended")
        else:
            super().__init__(f"a front end could not start ({described(exit_code)}); the reason is in its log above")
        self.exit_code = exit_code


class FrontEndProcess:
    """A running front end or side server, and the pipe that tells it what to do: at its end, to end.

    loaded: what it has said beside being loaded. The side server says its ports for health and metrics.
    """

    def __init__(self, process: asyncio.subprocess.Process, library_lines: LibraryLines) -> None:
        self._process = process
        self._library_lines = library_lines
        self.loaded = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, orders: FrontEndOrders, command: Sequence[str] = COMMAND) -> FrontEndProcess:
        """Returns when it has loaded what it needs but the engine. If cancelled, leaves nothing behind.

        Raises FrontEndStartError.
        """
        library_lines, descriptor = await LibraryLines.of(orders.name)
        orders = msgspec.structs.replace(orders, library_lines=descriptor)
        try:
            process = await started(command, (orders.board, descriptor))
        finally:
            os.close(descriptor)
        front_end = cls(process, library_lines)
        try:
            front_end._say(msgspec.json.encode(orders) + b"\n")
            front_end.loaded = await front_end._hear(LOADED)
        except BaseException:
            await front_end.kill()
            raise
        return front_end

    async def serve(self, socket: Path, port: int) -> int:
        """Returns when it serves, with the port. Raises FrontEndStartError."""
        self._say(msgspec.json.encode(ServeOrder(str(socket), port)) + b"\n")
        return int(await self._hear(b"ready "))

    def drain(self) -> None:
        """It takes no more completions, and ends when those that are open have, or their grace has."""
        self._say(DRAIN)

    def end(self) -> None:
        """It ends now, and whatever is open with it, by a status."""
        self._say(END)

    async def wait(self) -> int:
        """Its exit code, when it has ended."""
        return await self._process.wait()

    async def wait_stuck(self, silent_s: float) -> None:
        """Returns when its event loop, which says now and again that it turns, has said nothing for so long while this
        process ran. Never, if it has ended."""
        assert self._process.stdout is not None
        while True:
            try:
                async with running_timeout(silent_s):
                    line = await self._process.stdout.readline()
            except TimeoutError:
                return
            if not line:
                await asyncio.Event().wait()

    async def kill(self) -> None:
        """Idempotent."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        with suppress(TimeoutError):  # a process of its own would keep the pipe open
            async with asyncio.timeout(_LAST_LINES_S):
                await self._library_lines.wait_ended()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _say(self, line: bytes) -> None:
        """To one that has ended it means nothing."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(line)

    async def _hear(self, beginning: bytes) -> bytes:
        """The rest of its next line, which must begin so. Raises FrontEndStartError if it has ended instead, or says
        nothing, and is ended then."""
        assert self._process.stdout is not None
        try:
            async with running_timeout(START_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            await self.kill()
            raise FrontEndStartError(None) from None
        if not line.startswith(beginning):
            raise FrontEndStartError(await self._process.wait())
        return line.removeprefix(beginning).strip()
