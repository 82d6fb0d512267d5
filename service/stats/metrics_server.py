"""`/metrics`: the figures of all processes for Prometheus."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http import HTTPStatus
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import make_wsgi_app
from prometheus_client.core import CollectorRegistry, Metric

from runahead.runtime.wire.engine_config import ConfigError
from runahead.runtime.wire.figures import EngineStats
from runahead.runtime.wire.messages import EngineInfo
from runahead.service.shared_memory.board import Board
from runahead.service.stats.metrics import engine_metrics, gauge, service_metrics

PATH: Final = "/metrics"
_CONNECTIONS: Final = 16  # at once, a thread each; Prometheus needs one
_WHOLE_S: Final = 5.0  # for a connection, until its answer's end
_CHECK_S: Final = 0.1  # between checks for the shutdown

AskEngine = Callable[[], tuple[EngineInfo, EngineStats] | None]


class ServiceCollector:
    """Collects all families with one read of the board and one question to the engine.

    ask_engine: returns None if the engine does not answer at once. Its families are left out then, because an
    autoscaler must not see stale queues.
    """

    def __init__(self, board: Board, version: str, ask_engine: AskEngine) -> None:
        self._board = board
        self._version = version
        self._ask_engine = ask_engine

    def collect(self) -> Iterator[Metric]:
        """Collect for the registry."""
        yield gauge("runahead_info", "The server's version.", 1, {"version": self._version})
        answer = self._ask_engine()
        yield gauge("runahead_engine_up", "1 if the engine answers.", answer is not None)
        yield from service_metrics(self._board)
        if answer is not None:
            yield from engine_metrics(*answer)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing for a scrape."""


class _Server(ThreadingMixIn, WSGIServer):
    """A bounded number of threads, one for each connection; more connections are closed at once."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        """Bind. Raises OSError."""
        self.address_family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._connections = threading.BoundedSemaphore(_CONNECTIONS)
        self._due: dict[Any, float] = {}  # when each open connection is closed, monotonic
        super().__init__((str(address[0]), int(address[1])), _Handler)

    def server_bind(self) -> None:
        # Skips the library's DNS lookup of the address, which may take arbitrarily long.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._due[request] = time.monotonic() + _WHOLE_S
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread is available; the library closes the connection
            self._give_back(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._give_back(request)

    def service_actions(self) -> None:
        """Close overdue connections, called periodically."""
        now = time.monotonic()
        for request, due in self._due.copy().items():
            if due < now:
                with suppress(OSError):  # it has just ended
                    request.shutdown(socket.SHUT_RDWR)

    def _give_back(self, request: Any) -> None:
        del self._due[request]
        self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: the client has disconnected."""


class MetricsServer:
    """Serves one collector over HTTP in separate threads."""

    def __init__(self, host: str, port: int, collector: ServiceCollector) -> None:
        """Listen. port: 0 for any. Raises ConfigError."""
        host = host.strip("[]")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise ConfigError(f"{host} port {port} can't be listened on: {error.strerror}") from error
        self._server.set_app(_only_metrics(make_wsgi_app(registry)))
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_CHECK_S,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop accepting connections. Blocks briefly."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _only_metrics(app: Any) -> Any:
    """Restrict the application to one path, one format and all families, whatever the client asks: in OpenMetrics the
    library writes `vllm_` for `vllm:` unless clients accept unescaped names, and filters by name find nothing, because
    the library does not ask the collector for names.
    """

    def served(environ: WSGIEnvironment, start_response: StartResponse) -> Any:
        if environ.get("PATH_INFO") == PATH:
            asked = {name: value for name, value in environ.items() if name not in ("HTTP_ACCEPT", "QUERY_STRING")}
            return app(asked, start_response)
        status = HTTPStatus.NOT_FOUND
        start_response(f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"only {PATH} is served here\n".encode()]

    return served
