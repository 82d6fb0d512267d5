"""A front end: its gRPC server, and its process, `python -m runahead.service.servers.serve_front_end`, started by the
supervisor.

Lines on standard input (`runahead.service.processes.children`) tell it its orders, when to serve, to drain and to end.
The input's end means that the supervisor is gone, and it ends at once. Only the supervisor handles signals. Exit codes:
0 after a shutdown, 1 if the engine was lost or calls are no longer taken, 2 if it could not start.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
import structlog
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2

from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.calls.admission import Admission
from runahead.service.calls.call import FACADE, CallLog, Traces
from runahead.service.calls.call_interceptor import CallInterceptor, OpenCalls
from runahead.service.contract.errors import SHUTDOWN_SENTENCE
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.processes.children import DRAIN, LOADED, FrontEndOrders
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
from runahead.service.servicers.health import HealthServicer
from runahead.service.servicers.reflection import add_reflection
from runahead.service.servicers.servicer import GenerationServicer
from runahead.service.settings.bounded_files import FileError, read_text
from runahead.service.settings.server_config import EXIT_BROKEN, EXIT_OK
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import Board
from runahead.service.text.tokenizer import TextTokenizer, load_tokenizer
from runahead.v1 import add_GenerationServiceServicer_to_server, generation_service_pb2

if TYPE_CHECKING:
    from runahead.service.calls.spans import Spans

_VLLM_ENGINE: Final = FACADE.strip("/")
_LAST_WORDS_S: Final = 0.25  # for calls that are about to end: completions, health watches
_END_S: Final = 2.0  # for statuses to reach clients when streams are ended

log = structlog.get_logger(__name__)

_TEMPLATE_BYTES: Final = 1 << 20  # of a chat template file


class FrontEnd:
    """Serves one engine on one port. tokenizer: None serves token ids only. security: authentication.

    board, index: all front ends' figures and this one's line; None: the only front end.
    version: the server's. traces: receives spans of completions.
    """

    def __init__(
        self,
        engine: SocketEngineClient,
        tokenizer: TextTokenizer | None,
        settings: FrontEndSettings,
        security: Security,
        board: Board | None = None,
        index: int = 0,
        version: str = "",
        traces: Traces | None = None,
    ) -> None:
        self._engine = engine
        self._hurried = asyncio.Event()
        self._credentials = security.credentials
        self._calls = OpenCalls()
        board = board or Board()
        self._admission = Admission.of(settings, security.access, board, board.line(index))
        log = CallLog(is_on=settings.request_log)
        interceptor = CallInterceptor(
            self._calls, security.access, self._admission, settings.upload_timeout_s, log, traces
        )
        self._server = grpc.aio.server(interceptors=[interceptor], options=server_options(settings))
        self._health = HealthServicer((GENERATION,), settings.max_connections, settings.stalled_stream_s)
        self.servicer = GenerationServicer(
            engine, tokenizer, settings, board=board, index=index, version=version, admission=self._admission
        )
        add_GenerationServiceServicer_to_server(self.servicer, self._server)
        self._health.add_to(self._server)
        if settings.vllm_facade:
            # Loaded on demand: it needs an extra.
            from runahead.service.servicers.vllm_servicer import VllmServicer

            stalled_s, kv_events = settings.stalled_stream_s, settings.kv_events
            vllm = VllmServicer(self.servicer, engine, self._health, tokenizer, version, stalled_s, kv_events)
            vllm.add_to(self._server)
        if settings.reflection:
            files = [generation_service_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR]
            services = [GENERATION, HEALTH]
            if settings.vllm_facade:
                files.append(descriptor_pool.Default().FindFileContainingSymbol(_VLLM_ENGINE))
                services.append(_VLLM_ENGINE)
            not_served = set[str]() if settings.kv_events else {FACADE + "SubscribeKvEvents"}
            add_reflection(self._server, files, services, not_served)

    async def start(self, host: str, number: int) -> int:
        """Listen and become healthy. number: of the port, 0 for any. Returns the port. Raises ConfigError."""
        port = listen(self._server, host, number, self._credentials)
        self._measuring = asyncio.create_task(self._admission.keep_measuring())
        await self._server.start()
        self.servicer.counters.beat()
        self.servicer.counters.front_ends = 1
        self._health.set_serving(True)
        self._engine.tell_of_silence(lambda is_silent: self._health.set_ready(not is_silent))
        return port

    async def wait_ended(self) -> str:
        """Wait until the server takes no more calls and return the reason: unexpected before `stop`."""
        try:
            # A cancelled waiter must not cancel the library's own task.
            await asyncio.shield(self._server.wait_for_termination())
        except Exception as error:  # any error of the library
            return type(error).__name__
        return "it has stopped"

    def engine_lost(self) -> None:
        """Become unhealthy. New calls end with UNAVAILABLE like the open ones."""
        self._health.set_serving(False)

    def hurry(self) -> None:
        """End the grace of the current or next stop."""
        self._hurried.set()

    async def stop(self, grace_s: float) -> None:
        """Refuse new completions, give open ones `grace_s` seconds, then end all calls with UNAVAILABLE.

        The port stays open until then, so that new calls get the reason SHUTDOWN too.
        """
        self.servicer.close()
        self._health.close()
        waits = {asyncio.ensure_future(self.servicer.wait_drained()), asyncio.ensure_future(self._hurried.wait())}
        await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._engine.close("SHUTDOWN", SHUTDOWN_SENTENCE)
        await self._calls.end(_LAST_WORDS_S, lambda: self._server.stop(_END_S))
        await self.servicer.end()
        self._measuring.cancel()


def main() -> int:
    """Serve until told to end. Returns the exit code."""
    return serve_process(FrontEndOrders, _serve)


async def _serve(orders: FrontEndOrders, security: Security, board: Board, lines: asyncio.StreamReader) -> int:
    """Serve. Raises ConfigError, CheckpointError or EngineLostError if it can't."""
    tokenizer = _tokenizer(orders)
    say(LOADED)
    try:
        found = await connected_engine(orders, lines)
        if found is None:
            return EXIT_OK
        client, number = found
        spans = _spans(orders, client.info.model)
        front_end = FrontEnd(client, tokenizer, orders.settings, security, board, orders.index, orders.version, spans)
        keep_for_good()
        port = await front_end.start(orders.settings.host, number)
        say(b"ready %d" % port)
        alive = asyncio.create_task(say_that_it_lives(front_end.servicer.take_stock))
        try:
            return await _until_the_end(orders, client, front_end, lines)
        finally:
            alive.cancel()
            if spans is not None:
                spans.close()
    finally:
        if tokenizer is not None:
            await tokenizer.close()


def _spans(orders: FrontEndOrders, model: str) -> Spans | None:
    """Make the span exporter if configured; loaded on demand, because it needs an extra."""
    if not orders.settings.otlp_endpoint:
        return None
    from runahead.service.calls.spans import Spans

    return Spans(orders.settings.otlp_endpoint, model, orders.version)


async def _until_the_end(
    orders: FrontEndOrders, client: SocketEngineClient, front_end: FrontEnd, lines: asyncio.StreamReader
) -> int:
    told = asyncio.ensure_future(lines.readline())
    lost, ended = asyncio.ensure_future(client.wait_lost()), asyncio.ensure_future(front_end.wait_ended())
    await asyncio.wait({told, lost, ended}, return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        log.error("server_ended", why=ended.result())
        lost.cancel()
        told.cancel()
        await front_end.stop(0.0)
        return EXIT_BROKEN
    ended.cancel()
    if lost.done():
        log.error("engine_lost", reason=lost.result().reason)
        front_end.engine_lost()
        await asyncio.wait({told}, timeout=orders.linger_s)
        told.cancel()
        await front_end.stop(0.0)
        return EXIT_BROKEN
    lost.cancel()
    if told.result() != DRAIN:
        await front_end.stop(0.0)
        return EXIT_OK
    log.info("draining", open_streams=front_end.servicer.counters.open_streams)
    draining = asyncio.ensure_future(front_end.stop(orders.settings.shutdown_grace_s))
    hurry = asyncio.ensure_future(lines.readline())  # any line, and the end of the input
    await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
    front_end.hurry()
    hurry.cancel()
    await draining
    return EXIT_OK


def _tokenizer(orders: FrontEndOrders) -> TextTokenizer | None:
    """Load the checkpoint's tokenizer, unless disabled or missing beside random weights.

    Raises ConfigError or CheckpointError.
    """
    if orders.settings.tokenizer == "none":
        if orders.settings.chat_template:
            spelling = orders.engine.spelling
            raise ConfigError(f"{spelling('chat_template')} has no effect with {spelling('tokenizer')} none")
        return None
    checkpoint = open_checkpoint(Path(orders.engine.model))
    if orders.engine.load_format == "dummy" and not checkpoint.has_tokenizer:
        log.warning(
            "no_tokenizer",
            why=f"{checkpoint.path} has no tokenizer; random weights are served without: token ids only",
        )
        return None
    return load_tokenizer(checkpoint, _chat_template(orders))


def _chat_template(orders: FrontEndOrders) -> str | None:
    """Read the configured template, None without one. Raises ConfigError for an unreadable file."""
    path = orders.settings.chat_template
    if not path:
        return None
    spelling = orders.engine.spelling("chat_template")
    try:
        return read_text(path, _TEMPLATE_BYTES)
    except FileError as error:
        raise ConfigError(f"{spelling} {path} can't be read: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
