"""The supervisor: owns the engine, the front ends and the port, and outlives them.

It imports neither grpc nor torch and serves no calls, so little in it can fail. It starts processes, restarts a dead
front end, ends a stuck engine, and turns signals into a drain. When it dies, the standard input of every child ends,
which ends the child.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import IO, Any, Final, TypeVar

import msgspec
import structlog

from runahead.runtime.log_output import count_dropped_lines_in
from runahead.runtime.process_end import end_fields
from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.engine.pulse import EngineWatch, stuck_after_s
from runahead.service.processes import start_lines
from runahead.service.processes.checkpoint_check import check_checkpoint
from runahead.service.processes.children import (
    SIDE_COMMAND,
    EngineProcess,
    FrontEndOrders,
    FrontEndProcess,
    Keeper,
    Orphans,
    SideOrders,
)
from runahead.service.processes.ports import Ports
from runahead.service.settings.server_config import EXIT_BROKEN, EXIT_OK, ServerConfig
from runahead.service.shared_memory.board import Board, open_connections, process_figures
from runahead.service.version import full_version

T = TypeVar("T")

_STOCK_S: Final = 1.0  # between measurements of processes' resources
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)
_DRAINING: Final = signal.SIGHUP
_LAST_WORDS_S: Final = 5.0  # for a process to end, beyond its grace

log = structlog.get_logger(__name__)


async def supervise(config: ServerConfig, ports: Ports) -> int:
    """Serve until a signal, the engine's end, no front end is left, or a failure. Returns the exit code, which no
    further signal changes: they are blocked then. Leaves no process behind.

    Raises CheckpointError, ConfigError, EngineLostError, EngineStartError or FrontEndStartError if it can't start.
    """
    with _shared_memory(Board.size(config.front_end.frontends + 1)) as memory:
        supervisor = Supervisor(config, ports, memory.fileno())
        try:
            return await supervisor.run()
        finally:
            await supervisor.close()
            # The event loop restores the signals' defaults as it closes; a signal would then kill the process.
            signal.pthread_sigmask(signal.SIG_BLOCK, (*_ENDING, _DRAINING))


def _shared_memory(size: int) -> IO[bytes]:
    """Make an unnamed file of `size` bytes. Raises ConfigError, for example on a read-only root."""
    with ExitStack() as held:
        try:
            memory = held.enter_context(tempfile.TemporaryFile())
            # A store to a page of a hole without room on the disk would end the process by SIGBUS.
            memory.write(bytes(size))
            memory.flush()
        except FileNotFoundError as error:
            raise ConfigError("no folder for temporary files can be written to; set TMPDIR to one that can") from error
        except OSError as error:
            raise ConfigError(
                f"{tempfile.gettempdir()!r}, the folder for temporary files, can't hold the {size} bytes that the "
                f"processes share: {error.strerror}; TMPDIR names another one"
            ) from error
        held.pop_all()
    return memory


class _Signals:
    """Signals: the first drains, the second ends streams at once, the third kills. SIGHUP only drains and is not
    counted, since a terminal that closes sends several, and does nothing if ignored at the start, as under nohup.
    """

    def __init__(self) -> None:
        self.stop, self.hurry, self.kill = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._next = iter((self.stop, self.hurry, self.kill))
        for number in _ENDING:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        if signal.getsignal(_DRAINING) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(_DRAINING, self.stop.set)

    def _on_signal(self) -> None:
        if (event := next(self._next, None)) is not None:
            event.set()


class Supervisor:
    """Runs the service. memory: descriptor of the front ends' shared memory (`Board`)."""

    def __init__(self, config: ServerConfig, ports: Ports, memory: int) -> None:
        self._config = config
        self._settings = config.front_end
        self._ports = ports
        self._memory = memory
        self._board = Board(self._settings.frontends + 1, memory)  # the side server has the last line
        count_dropped_lines_in(self._board.processes.dropped_lines("supervisor"))
        self._version = full_version()
        self._signals = _Signals()
        self._front_ends: dict[int, FrontEndProcess] = {}  # started ones, by index
        self._side: FrontEndProcess | None = None
        self._keepers: list[asyncio.Task[None]] = []  # of front ends
        self._side_keeper: asyncio.Task[None] | None = None
        self._stock: asyncio.Task[None] | None = None
        self._engine: EngineProcess | None = None
        self._watch: EngineWatch | None = None
        self._told_at: float | None = None  # when the end was ordered, on the event loop's clock

    async def run(self) -> int:
        """Run the service. Raises the errors of `supervise`."""
        if await self._unless_told(self._start()) is None:
            return await self._drain()  # front ends that already serve
        assert self._engine is not None and self._watch is not None
        self._stock = asyncio.create_task(self._take_stock())
        log.info(
            "serving",
            host=self._ports.service.host,
            port=self._ports.service.number,
            health_port=self._ports.health.in_words,
            control_port=self._ports.control.in_words,
            metrics_port=self._ports.metrics.in_words,
            model=self._config.engine.served_name,
            front_ends=len(self._front_ends),
        )
        start_lines.say_serving(self._config, self._ports.service.number, self._engine.device)
        self._keepers = [asyncio.create_task(self._keep(index)) for index in self._front_ends]
        self._side_keeper = asyncio.create_task(self._keep_side())
        told = asyncio.create_task(self._signals.stop.wait())
        ended = asyncio.create_task(self._engine_end(self._engine, self._watch))
        none_left = asyncio.ensure_future(asyncio.wait(self._keepers))
        failed = asyncio.ensure_future(self._failure(self._stock, self._side_keeper, *self._keepers))
        waits: tuple[asyncio.Future[Any], ...] = (told, failed, ended, none_left)
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if told.done():
            return await self._drain()
        if failed.done():
            log.error("supervisor_failed", exc_info=failed.result())
            await self._drain()
            return EXIT_BROKEN
        if self._engine.has_ended:
            log.error("engine_lost", **end_fields(await ended))
            return await self._after_the_engine()
        log.error("no_front_end_left")
        await self._end_side()
        return EXIT_BROKEN

    async def close(self) -> None:
        """End everything that still runs."""
        tasks = [task for task in (*self._keepers, self._side_keeper, self._stock) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in (*self._front_ends.values(), self._side):
            if process is not None:
                await process.kill()
        if self._watch is not None:
            self._watch.close()
        if self._engine is not None:
            log.info("engine_ended", **end_fields(await self._engine.stop(self._grace_left_s())))

    def _grace_left_s(self) -> float:
        """Return the engine's remaining grace, at least some seconds: a healthy engine needs less."""
        if self._signals.kill.is_set():
            return 0.0
        grace_s = self._settings.shutdown_grace_s
        spent_s = 0.0 if self._told_at is None else asyncio.get_running_loop().time() - self._told_at
        return min(grace_s, max(grace_s - spent_s, _LAST_WORDS_S))

    # ------------------------------------------------------------ start

    async def _start(self) -> bool:
        """Start the side server first, which answers probes while a model loads; then check the checkpoint's files and
        load front ends, which may refuse before the engine starts.
        """
        await self._load_side()
        engine = self._config.engine
        tokenizer_vocab = await check_checkpoint(engine, has_tokenizer=self._settings.tokenizer != "none")
        engine = msgspec.structs.replace(engine, tokenizer_vocab=tokenizer_vocab)
        self._config = replace(self._config, engine=engine)
        for index in range(self._settings.frontends):
            await self._load(index)
        dropped_lines = self._memory, self._board.dropped_lines_index("engine")
        self._engine = await EngineProcess.start(self._config.engine, self._settings.log, dropped_lines=dropped_lines)
        self._watch = await EngineWatch.connect(
            self._engine.socket, stuck_after_s(self._config.engine.launch_timeout_s)
        )
        await self._serve_side()
        for index in range(self._settings.frontends):
            await self._serve(index)
        return True

    async def _load(self, index: int) -> None:
        """Load a front end. Raises FrontEndStartError."""
        self._front_ends[index] = await FrontEndProcess.start(FrontEndOrders(**self._orders(index)))

    def _orders(self, index: int) -> dict[str, Any]:
        """Return orders common to a front end and the side server. index: of its line on the board."""
        return {
            "engine": self._config.engine,
            "settings": self._settings,
            "index": index,
            "board": self._memory,
            "version": self._version,
            "linger_s": self._config.linger_s,
        }

    async def _serve(self, index: int) -> FrontEndProcess:
        """Let a front end serve. Raises FrontEndStartError."""
        assert self._engine is not None
        front_end, port = self._front_ends[index], self._ports.service
        port.number = await front_end.serve(self._engine.socket, port.number)
        return front_end

    async def _load_side(self) -> None:
        """Load the side server. Raises FrontEndStartError."""
        orders = SideOrders(
            **self._orders(self._settings.frontends),
            health_port=self._ports.health.number,
            metrics_port=self._ports.metrics.number,
        )
        self._side = await FrontEndProcess.start(orders, SIDE_COMMAND)
        self._ports.health.number, self._ports.metrics.number = map(int, self._side.loaded.split())

    async def _serve_side(self) -> FrontEndProcess:
        """Let the side server serve. Raises FrontEndStartError."""
        assert self._engine is not None and self._side is not None
        port = self._ports.control
        port.number = await self._side.serve(self._engine.socket, port.number)
        return self._side

    async def _unless_told(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, or cancel it and return None if a signal comes first."""
        task, told = asyncio.create_task(work), asyncio.create_task(self._signals.stop.wait())
        try:
            await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return None
        finally:
            told.cancel()

    # ------------------------------------------------------------ service

    async def _take_stock(self) -> None:
        """Write each process's resources on the board and reap orphans, periodically."""
        orphans = Orphans()
        while True:
            orphans.reap(pid for _, pid in self._pids())
            connections = open_connections(self._ports.service.number)
            self._board.processes.write(process_figures(self._pids()), connections)
            await asyncio.sleep(_STOCK_S)

    def _pids(self) -> Iterator[tuple[str, int]]:
        """Yield the service's processes by name."""
        yield "supervisor", os.getpid()
        if self._engine is not None:
            yield "engine", self._engine.pid
        for index, front_end in self._front_ends.items():
            yield f"front_end_{index + 1}", front_end.pid
        if self._side is not None:
            yield "side_server", self._side.pid

    async def _keep(self, index: int) -> None:
        """Keep a front end running. Returns when it is given up."""

        async def start() -> FrontEndProcess:
            await self._load(index)
            return await self._serve(index)

        keeper = Keeper("front_end", start, lambda: self._board.clear(index), self._is_over, front_end=index + 1)
        await keeper.keep(self._front_ends[index])

    async def _keep_side(self) -> None:
        """Keep the side server running; the service goes on without it."""

        async def start() -> FrontEndProcess:
            await self._load_side()
            return await self._serve_side()

        assert self._side is not None
        keeper = Keeper("side_server", start, lambda: self._board.clear(self._settings.frontends), self._is_over)
        await keeper.keep(self._side)

    def _is_over(self) -> bool:
        return self._engine is not None and self._engine.has_ended

    async def _failure(self, *tasks: asyncio.Task[None]) -> BaseException | None:
        """Return the exception of a background task, or None when all have ended without one. Such a task's work would
        remain undone.
        """
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        return next((error for task in ended if not task.cancelled() and (error := task.exception())), None)

    async def _engine_end(self, engine: EngineProcess, watch: EngineWatch) -> int:
        """Wait for the engine's exit code. A stuck engine is ended."""
        ended, stuck = asyncio.ensure_future(engine.wait()), asyncio.ensure_future(watch.wait_stuck())
        await asyncio.wait({ended, stuck}, return_when=asyncio.FIRST_COMPLETED)
        stuck.cancel()
        if not ended.done():
            log.error("engine_stuck", silent_s=stuck_after_s(self._config.engine.launch_timeout_s))
            engine.kill()
        return await ended

    # ------------------------------------------------------------ end

    async def _drain(self) -> int:
        """Drain the front ends. A second signal ends their grace, a third kills everything."""
        log.info("shutting_down", open_streams=self._board.total().open_streams)
        self._told_at = asyncio.get_running_loop().time()
        self._stop_keeping()
        for process in (*self._front_ends.values(), self._side):
            if process is not None:
                process.drain()
        hurry = asyncio.create_task(self._signals.hurry.wait())
        all_ended = asyncio.ensure_future(self._front_ends_end())
        grace_s = self._settings.shutdown_grace_s + _LAST_WORDS_S
        await asyncio.wait({hurry, all_ended}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        if not all_ended.done():
            log.warning("grace_ended")
            for front_end in self._front_ends.values():
                front_end.end()
            kill = asyncio.create_task(self._signals.kill.wait())
            await asyncio.wait({kill, all_ended}, timeout=_LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
            kill.cancel()
        exit_code = EXIT_OK if all_ended.done() else EXIT_BROKEN
        hurry.cancel()
        all_ended.cancel()
        await self._end_side()
        return exit_code

    async def _after_the_engine(self) -> int:
        """Wait for the front ends, which end by themselves after the engine's loss."""
        self._stop_keeping()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.linger_s + _LAST_WORDS_S):
                await self._front_ends_end()
        await self._end_side()
        return EXIT_OK if self._signals.stop.is_set() else EXIT_BROKEN

    async def _end_side(self) -> None:
        """End the side server, which has answered probes until the last stream's end. The engine ends meanwhile and is
        no longer watched.
        """
        if self._watch is not None:
            self._watch.close()
        if self._engine is not None:
            self._engine.ask_to_stop()
        if self._side is not None and not self._signals.kill.is_set():
            self._side.end()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._side.wait()

    def _stop_keeping(self) -> None:
        for keeper in (*self._keepers, self._side_keeper):
            if keeper is not None:
                keeper.cancel()

    async def _front_ends_end(self) -> None:
        for front_end in self._front_ends.values():
            await front_end.wait()
