"""`/metrics`: the figures of all processes of the service, for Prometheus."""

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
from runahead.service.stats.engine_metrics import engine_metrics
from runahead.service.stats.metrics_families import gauge
from runahead.service.stats.service_metrics import service_metrics

PATH: Final = "/metrics"
_CONNECTIONS: Final = 16  # at once; each has a thread. Prometheus needs one
_WHOLE_S: Final = 5.0  # for which there may be a connection, from when it is taken to the answer's end
_LOOK_S: Final = 0.1  # from one look at whether it is to close to the next

AskEngine = Callable[[], tuple[EngineInfo, EngineStats] | None]


class ServiceCollector:
    """All families of metrics, from one look at the board and one question to the engine.

    ask_engine: None is its answer where there is no engine, or it does not answer at once: then its families are left
    out, since what an autoscaler is told of a queue must not be of yesterday.
    """

    def __init__(self, board: Board, version: str, ask_engine: AskEngine) -> None:
        self._board = board
        self._version = version
        self._ask_engine = ask_engine

    def collect(self) -> Iterator[Metric]:
        """As a registry asks for them."""
        yield gauge("runahead_info", "The server's version.", 1, {"version": self._version})
        answer = self._ask_engine()
        yield gauge("runahead_engine_up", "1 if the engine answers.", answer is not None)
        yield from service_metrics(self._board)
        if answer is not None:
            yield from engine_metrics(*answer)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for each scrape says nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, of which there are only so many: more are closed at once."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError."""
        self.address_family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._places = threading.BoundedSemaphore(_CONNECTIONS)
        self._due: dict[Any, float] = {}  # when each connection that has a place is ended, on the monotonic clock
        super().__init__((str(address[0]), int(address[1])), _Handler)

    def server_bind(self) -> None:
        # Without the library's question to the DNS what this address is called, which may take as long as that likes.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._due[request] = time.monotonic() + _WHOLE_S
        try:
            super().process_request(request, client_address)
        except BaseException:  # there is no thread to be had; the library closes the connection
            self._give_back(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._give_back(request)

    def service_actions(self) -> None:
        """Looks now and then for connections whose time is over, whatever they say meanwhile."""
        now = time.monotonic()
        for request, due in self._due.copy().items():
            if due < now:
                with suppress(OSError):  # it has just ended by itself
                    request.shutdown(socket.SHUT_RDWR)

    def _give_back(self, request: Any) -> None:
        del self._due[request]
        self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: whoever asked has gone."""


class MetricsServer:
    """Serves one collector over HTTP, on threads of its own."""

    def __init__(self, host: str, port: int, collector: ServiceCollector) -> None:
        """Listens. port: 0 is any. Raises ConfigError."""
        host = host.strip("[]")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise ConfigError(f"{host} port {port} can't be listened on: {error.strerror}") from error
        self._server.set_app(_only_metrics(make_wsgi_app(registry)))
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_LOOK_S,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes no more connections. Blocks for a moment."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _only_metrics(app: Any) -> Any:
    """The application, at one path, in one format and whole, whatever somebody would rather have: in OpenMetrics the
    library writes `vllm_` for `vllm:` to those who ask for no escaping of their own, and nobody looks for that; and of
    families that are asked for by name it finds none, since it does not ask our collector for their names."""

    def served(environ: WSGIEnvironment, start_response: StartResponse) -> Any:
        if environ.get("PATH_INFO") == PATH:
            asked = {name: value for name, value in environ.items() if name not in ("HTTP_ACCEPT", "QUERY_STRING")}
            return app(asked, start_response)
        status = HTTPStatus.NOT_FOUND
        start_response(f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"only {PATH} is served here\n".encode()]

    return served
