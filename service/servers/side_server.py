"""The side server, `python -m runahead.service.servers.side_server`: health, metrics and operators' calls on separate
ports.

It answers however busy the service port is: it runs in a separate process, outside the service port's limits. The
supervisor starts it, and it takes orders like a front end (`runahead.service.processes.children`). It serves
health and metrics at once, and operators' calls when the engine runs. Exit codes: 0 after a shutdown, 2 if it could not
start.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import CancelledError
from socket import gethostname
from typing import Final

import grpc
import msgspec
import structlog
from grpc_health.v1 import health_pb2

from runahead.runtime.wire.figures import EngineStats
from runahead.runtime.wire.messages import EngineInfo
from runahead.service.calls.admission import Access, Admission
from runahead.service.calls.call import CallLog
from runahead.service.calls.call_interceptor import CallInterceptor, OpenCalls
from runahead.service.contract.errors import SHUTDOWN_SENTENCE
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import EngineLostError
from runahead.service.kv_events.feed import KvFeed
from runahead.service.processes.children import DRAIN, LOADED, SideOrders
from runahead.service.servers.supervised import (
    GENERATION,
    HEALTH,
    Security,
    connected_engine,
    keep_for_good,
    listen,
    say,
    say_that_it_lives,
    serve_process,
    server_options,
)
from runahead.service.servicers.control_servicer import NOT_SERVED, ControlServicer
from runahead.service.servicers.health import HealthServicer
from runahead.service.servicers.reflection import add_reflection
from runahead.service.settings.loopback import LOOPBACK
from runahead.service.settings.server_config import EXIT_OK
from runahead.service.settings.settings import NO_PORT, FrontEndSettings
from runahead.service.shared_memory.board import Board
from runahead.service.stats.metrics_server import MetricsServer, ServiceCollector
from runahead.service.stats.stats import StatsFeed
from runahead.v1 import add_GenerationServiceServicer_to_server, generation_service_pb2

_CONNECTIONS: Final = 1024  # to each port
_IDLE_S: Final = 15.0  # after which a connection without calls is closed
_CHECK_S: Final = 0.1  # between checks of the front ends
_SILENT_S: Final = 3.0  # without a front end's sign of life, which comes each second; late checks count once
_LAST_WORDS_S: Final = 0.25  # for calls that are about to end
_END_S: Final = 1.0  # for statuses to reach clients
_SCRAPE_S: Final = 0.5  # that Prometheus waits for the engine

log = structlog.get_logger(__name__)


class SideServer:
    """Serves the side ports. board, index: all front ends' figures and this process's line. version: the server's.

    The server is live once it listens. It is ready while a front end serves, the engine is heard and no shutdown has
    begun.
    """

    def __init__(self, settings: FrontEndSettings, security: Security, board: Board, index: int, version: str) -> None:
        self._settings = msgspec.structs.replace(
            settings,
            max_connections=_CONNECTIONS,
            max_connection_idle_s=min(settings.max_connection_idle_s, _IDLE_S),
            frontends=1,
        )
        self._security = security
        self._board = board
        self._own = Board()  # its calls count for no limit of the service port, nor the reverse
        self._line = board.line(index, self._own.held)
        self._version = version
        self._calls = OpenCalls()
        self._health = HealthServicer((GENERATION,), _CONNECTIONS, settings.stalled_stream_s)
        self._health.set_ready(False)
        self._servers: list[grpc.aio.Server] = []
        self._engine: SocketEngineClient | None = None
        self._feed: StatsFeed | None = None
        self._is_heard = False
        self._checking: asyncio.Task[None] | None = None
        self._checks = 0  # checks of the board
        self._heard: dict[
            int, tuple[int, int]
        ] = {}  # of front ends, by line: the last sign of life, and the check that saw it
        self._metrics: MetricsServer | None = None
        self._publishing: asyncio.Task[None] | None = None

    async def listen(self, health_port: int, metrics_port: int) -> tuple[int, int]:
        """Serve health and metrics in plain text, without authentication: live but not ready. Returns the ports,
        NO_PORT for one that is off. Raises ConfigError.
        """
        loop = asyncio.get_running_loop()
        collector = ServiceCollector(self._board, self._version, lambda: self._engine_figures(loop))
        if metrics_port != NO_PORT:
            self._metrics = MetricsServer(self._settings.metrics_host, metrics_port, collector)
            metrics_port = self._metrics.port
        if health_port != NO_PORT:
            server = self._server(Access())
            health_port = listen(server, self._settings.health_host, health_port)
            await server.start()
            self._servers.append(server)
        self._health.set_serving(True)
        return health_port, metrics_port

    async def serve(self, engine: SocketEngineClient, control_port: int) -> int:
        """Serve the control port, unless it is NO_PORT, and become ready once a front end serves. Returns the port.
        Raises ConfigError.
        """
        self._engine = engine
        if control_port != NO_PORT:
            control_port = await self._serve_control(engine, control_port)
        if self._settings.kv_events_port != NO_PORT:
            self._publishing = self._publish(engine)
        self._is_heard = True
        engine.tell_of_silence(self._on_silence)
        self._checking = asyncio.create_task(self._check())
        return control_port

    def drain(self) -> None:
        """Become not ready and end watchers. Stats and Abort are served until `stop`."""
        self._health.close()
        if self._feed is not None:
            self._feed.close()

    def engine_lost(self) -> None:
        """Become not live."""
        self._health.set_serving(False)

    async def stop(self) -> None:
        """End every call."""
        self.drain()
        for task in (self._checking, self._publishing):
            if task is not None:
                task.cancel()
        if self._engine is not None:
            self._engine.close("SHUTDOWN", SHUTDOWN_SENTENCE)
        await self._calls.end(_LAST_WORDS_S, self._stop_servers)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)  # a scrape may wait for this event loop

    async def _serve_control(self, engine: SocketEngineClient, port: int) -> int:
        """Listen on the control port and return it. Raises ConfigError."""
        self._feed = StatsFeed(engine, self._board, self._line, self._version, self._settings.stalled_stream_s)
        server = self._server(self._security.access)
        add_GenerationServiceServicer_to_server(ControlServicer(engine, self._feed), server)
        if self._settings.reflection:
            files = generation_service_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR
            add_reflection(server, files, (GENERATION, HEALTH), {f"/{GENERATION}/{name}" for name in NOT_SERVED})
        port = listen(server, LOOPBACK, port, self._security.credentials)
        await server.start()
        self._servers.append(server)
        return port

    def _publish(self, engine: SocketEngineClient) -> asyncio.Task[None]:
        """Start publishing KV events. Raises ConfigError."""
        # Loaded on demand: it needs an extra.
        from runahead.service.servers.kv_publisher import KvPublisher, topic

        settings = self._settings
        name = topic(settings.kv_events_pod or gethostname(), engine.info.model)
        publisher = KvPublisher(
            name, engine.info, settings.kv_events_host, settings.kv_events_port, settings.kv_events_replay_port
        )
        log.info("kv_events_published", topic=name.decode(), port=publisher.port, replay_port=publisher.replay_port)
        publishing = asyncio.create_task(KvFeed(engine, publisher).run())

        def end(task: asyncio.Task[None]) -> None:
            publisher.close()
            if not task.cancelled() and (error := task.exception()):
                log.warning("kv_events_ended", why=str(error))

        publishing.add_done_callback(end)
        return publishing

    async def _stop_servers(self) -> None:
        await asyncio.gather(*(server.stop(_END_S) for server in self._servers))

    def _engine_figures(self, loop: asyncio.AbstractEventLoop) -> tuple[EngineInfo, EngineStats] | None:
        """Return the engine's figures on other threads than the loop's; None if the engine does not answer at once."""
        if self._engine is None or not self._is_heard:
            return None
        answer = asyncio.run_coroutine_threadsafe(self._engine.stats(), loop)
        try:
            return self._engine.info, answer.result(_SCRAPE_S)
        except (EngineLostError, TimeoutError, CancelledError):
            answer.cancel()
            return None

    def _server(self, access: Access) -> grpc.aio.Server:
        admission = Admission.of(self._settings, access, self._own, self._line)
        calls_log = CallLog(is_on=self._settings.request_log)
        interceptor = CallInterceptor(self._calls, access, admission, self._settings.upload_timeout_s, calls_log)
        server = grpc.aio.server(interceptors=[interceptor], options=server_options(self._settings))
        self._health.add_to(server)
        return server

    def _on_silence(self, is_silent: bool) -> None:
        self._is_heard = not is_silent
        self._tell()

    async def _check(self) -> None:
        """Check the board, which sends no notifications."""
        while True:
            self._checks += 1
            self._tell()
            await asyncio.sleep(_CHECK_S)

    def _tell(self) -> None:
        self._health.set_ready(self._is_heard and self._somebody_serves())

    def _somebody_serves(self) -> bool:
        """Whether a front end serves and its event loop shows signs of life. Forgets dead ones."""
        words = self._board.serving()
        self._heard = {line: last for line, last in self._heard.items() if line in words}
        for line, word in words.items():
            if self._heard.get(line, (None,))[0] != word:
                self._heard[line] = word, self._checks
        return any((self._checks - self._heard[line][1]) * _CHECK_S < _SILENT_S for line in words)


def main() -> int:
    """Serve until told to end. Returns the exit code."""
    return serve_process(SideOrders, _serve)


async def _serve(orders: SideOrders, security: Security, board: Board, lines: asyncio.StreamReader) -> int:
    """Serve. Raises ConfigError or EngineLostError if it can't."""
    side = SideServer(orders.settings, security, board, orders.index, orders.version)
    keep_for_good()
    say(LOADED + b" %d %d" % await side.listen(orders.health_port, orders.metrics_port))
    try:
        return await _serve_engine(orders, side, lines)
    finally:
        await side.stop()


async def _serve_engine(orders: SideOrders, side: SideServer, lines: asyncio.StreamReader) -> int:
    """Serve the control port once the engine runs."""
    found = await connected_engine(orders, lines)
    if found is None:
        return EXIT_OK
    client, port = found
    say(b"ready %d" % await side.serve(client, port))
    alive = asyncio.create_task(say_that_it_lives(lambda: None))
    lost = asyncio.create_task(_tell_of_loss(client, side))
    try:
        while await lines.readline() == DRAIN:
            side.drain()
    finally:
        alive.cancel()
        lost.cancel()
    return EXIT_OK


async def _tell_of_loss(client: SocketEngineClient, side: SideServer) -> None:
    await client.wait_lost()
    side.engine_lost()


if __name__ == "__main__":
    sys.exit(main())
