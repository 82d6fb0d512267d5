"""The gRPC server of a front end, from its first health probe to its last stream's end."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2

from runahead.service.calls.access import FACADE
from runahead.service.calls.admission import Admission
from runahead.service.calls.call_interceptor import CallInterceptor, OpenCalls
from runahead.service.calls.call_log import CallLog, Traces
from runahead.service.contract.errors import SHUTDOWN_SENTENCE
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.servers.server_options import Security, listen, server_options
from runahead.service.servicers.health import HealthServicer
from runahead.service.servicers.reflection import add_reflection
from runahead.service.servicers.servicer import GenerationServicer
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import Board
from runahead.service.text.tokenizer import TextTokenizer
from runahead.v1 import add_GenerationServiceServicer_to_server, generation_service_pb2

GENERATION: Final = "runahead.v1.GenerationService"
HEALTH: Final = "grpc.health.v1.Health"
_VLLM_ENGINE: Final = FACADE.strip("/")
_LAST_WORDS_S: Final = 0.25  # for calls that are about to end: completions, health watches
_END_S: Final = 2.0  # for statuses to reach clients when streams are ended


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
        self._tokenizer = tokenizer
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

    def take_stock(self) -> None:
        """Publish sampled figures on the board."""
        self.servicer.counters.beat()
        self.servicer.counters.unread_bytes = self._engine.unread_bytes
        self.servicer.counters.waiting_structures = self.servicer.waiting_structures
        texts = 0 if self._tokenizer is None else self._tokenizer.waiting
        self.servicer.counters.waiting_texts = texts + self.servicer.waiting_chats

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
