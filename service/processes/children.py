"""The supervisor's side of its processes: the engine, front ends and the side server. A front end or side server that
died is started again, and one that hangs is ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from runahead.runtime.log_output import LogOutput
from runahead.runtime.process_end import described, end_fields
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.service.engine.pulse import running_timeout
from runahead.service.log.library_lines import LibraryLines
from runahead.service.processes.interrupts import started
from runahead.service.processes.socket_folder import SocketFolder, make_socket_folder
from runahead.service.settings.settings import FrontEndSettings

_CHILDREN: Final = Path("/proc/thread-self/children")
ENGINE_MODULE: Final = "runahead.runtime.process.main"
# -P: no file in the current directory can replace a module.
ENGINE_COMMAND: Final = (sys.executable, "-P", "-m", ENGINE_MODULE)

FRONT_END_MODULE: Final = "runahead.service.servers.serve_front_end"
SIDE_MODULE: Final = "runahead.service.servers.side_server"
COMMAND: Final = (sys.executable, "-P", "-m", FRONT_END_MODULE)
SIDE_COMMAND: Final = (sys.executable, "-P", "-m", SIDE_MODULE)

LOADED: Final = b"loaded"
ALIVE: Final = b"alive"
_LAST_LINES_S: Final = 1.0
ALIVE_S: Final = 1.0  # between signs of life
START_S: Final = 60.0  # for each of the two steps of a start, which take seconds
DRAIN: Final = b"drain\n"
END: Final = b"end\n"

BACK_OFF_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # before each start, in a row of quick deaths
SERVED_S: Final = 30.0  # after which a death does not count as a failed start
SILENT_S: Final = 15.0  # its event loop does nothing that takes a hundredth of this

log = structlog.get_logger(__name__)


class FrontEndOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a front end's standard input.

    index: from 0. board: descriptor of the shared memory. version: the server's.
    linger_s: how long it reports NOT_SERVING after the engine was lost, before it ends. library_lines: descriptor of
        its libraries' standard error, set at its start.
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
    """The first line for the side server. health_port, metrics_port: to listen on at once; 0 is any, NO_PORT none."""

    health_port: int
    metrics_port: int

    @property
    def name(self) -> str:
        return "side_server"


class ServeOrder(msgspec.Struct, frozen=True):
    """The second line: the engine's socket and the port to serve on; 0 is any."""

    socket: str
    port: int


class FrontEndStartError(RuntimeError):
    """A front end ended before it served, with its reason on standard error, or was ended because it sent nothing for
    too long. exit_code: None then.
    """

    def __init__(self, exit_code: int | None) -> None:
        if exit_code is None:
            super().__init__(f"a front end said nothing for {START_S:g} s while it started, and was ended")
        else:
            super().__init__(f"a front end could not start ({described(exit_code)}); the reason is in its log above")
        self.exit_code = exit_code


class _Child:
    """A running process and its standard input, whose end makes it end."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.returncode is not None

    async def wait(self) -> int:
        """Wait for its end and return its exit code."""
        return await self._process.wait()


class FrontEndProcess(_Child):
    """A front end or side server. loaded: what it said when it had loaded; the side server's ports."""

    def __init__(self, process: Process, library_lines: LibraryLines) -> None:
        super().__init__(process)
        self._library_lines = library_lines
        self.loaded = b""

    @classmethod
    async def start(cls, orders: FrontEndOrders, command: Sequence[str] = COMMAND) -> FrontEndProcess:
        """Start the process; returns when it has loaded everything but the engine. A cancelled start leaves nothing
        behind.

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
        """Let it serve; returns its port when it does. Raises FrontEndStartError."""
        self._say(msgspec.json.encode(ServeOrder(str(socket), port)) + b"\n")
        return int(await self._hear(b"ready "))

    def drain(self) -> None:
        """Let it refuse new completions, and end after the open ones or their grace."""
        self._say(DRAIN)

    def end(self) -> None:
        """Let it end now, and open calls with a status."""
        self._say(END)

    async def wait_stuck(self, silent_s: float) -> None:
        """Return when its event loop has sent no sign of life for this long while this process ran. Never returns if it
        has ended.
        """
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
        """Kill it. Idempotent."""
        if not self.has_ended:
            self._process.kill()
        await self.wait()
        with suppress(TimeoutError):  # a child process would keep the pipe open
            async with asyncio.timeout(_LAST_LINES_S):
                await self._library_lines.wait_ended()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _say(self, line: bytes) -> None:
        """Write a line; no effect if it has ended."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(line)

    async def _hear(self, beginning: bytes) -> bytes:
        """Return the rest of its next line, which must begin so. Raises FrontEndStartError if it ends instead, or is
        silent, in which case it is ended.
        """
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


class EngineStartError(RuntimeError):
    """The engine's process ended before it was ready; its reason is on standard error."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the engine could not start ({described(exit_code)}); the reason is in its log above")
        self.exit_code = exit_code


class EngineProcess(_Child):
    """An engine. It logs to this process's standard error. socket: in a folder that only this user can enter. device:
    the detected or configured one, known when it is ready.
    """

    def __init__(self, process: Process, folder: SocketFolder) -> None:
        super().__init__(process)
        self.socket = folder.socket
        self._folder = folder
        self.device = ""

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        log: LogOutput,
        command: Sequence[str] = ENGINE_COMMAND,
        dropped_lines: tuple[int, int] | None = None,
    ) -> EngineProcess:
        """Start the engine; returns when it listens. A cancelled start leaves nothing behind.

        dropped_lines: where it counts dropped log lines, as a file descriptor and the index of a 64-bit word.

        Raises ConfigError without a folder for its socket, and EngineStartError.
        """
        folder = make_socket_folder()
        try:
            process = await started(command, () if dropped_lines is None else dropped_lines[:1])
        except BaseException:
            folder.remove()
            raise
        engine = cls(process, folder)
        try:
            await engine._greet({"config": config, "log": log, "dropped_lines": dropped_lines})
        except BaseException:
            await engine.stop(grace_s=0.0)
            raise
        return engine

    def kill(self) -> None:
        """Kill an engine that does not react. `wait` returns when it has ended."""
        if not self.has_ended:
            self._process.kill()

    def ask_to_stop(self) -> None:
        """Ask the engine to drain and end. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def stop(self, grace_s: float) -> int:
        """Ask the engine to stop, and kill it after `grace_s` seconds. Returns its exit code. Idempotent."""
        self.ask_to_stop()
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            self.kill()
        finally:
            self._folder.remove()
        return await self.wait()

    async def _greet(self, orders: dict[str, object]) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(
            msgspec.json.encode({"socket": str(self.socket), "parent": os.getpid(), **orders}) + b"\n"
        )
        try:
            await self._process.stdin.drain()
        except ConnectionError:
            raise EngineStartError(await self._process.wait()) from None
        ready, _, device = (await self._process.stdout.readline()).strip().partition(b" ")
        if ready != b"ready":
            raise EngineStartError(await self._process.wait())
        self.device = device.decode("ascii", "replace")


class Orphans:
    """Children that this process did not start: as PID 1 of a container it inherits orphans."""

    def __init__(self) -> None:
        self._ended: set[int] = set()

    def reap(self, own: Iterable[int]) -> None:
        """Reap orphans; call it regularly. own: processes that are waited for. A child that ends while it starts is not
        among them yet, so only those are reaped that had ended at the previous call too.
        """
        ended = _ended_children().difference(own)
        for pid in ended & self._ended:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended


def _ended_children() -> set[int]:
    """Return the ended children of this thread's process without reaping them."""
    try:
        children = map(int, _CHILDREN.read_text().split())
        return {pid for pid in children if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)}
    except OSError:  # a system without such a list, or a child that was reaped meanwhile
        return set()
