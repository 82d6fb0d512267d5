"""The gRPC server: its services on one port, from the first health probe to the last stream's end."""

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
from runahead.service.servers.listening import listen
from runahead.service.servers.security import Security
from runahead.service.servers.server_options import server_options
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
_LAST_WORDS_S: Final = 0.25  # for calls that end by themselves now: completions, health watches
_END_S: Final = 2.0  # for statuses to reach clients when streams are ended


class FrontEnd:
    """Serves one engine on one port. tokenizer: None serves token ids alone. security: who may call.

    board, index: the figures of all front ends of the engine, and which of them this one is; None: it is the only one.
    version: of the server. traces: where the spans of completions go.
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
            # Loaded only where it is wanted: it needs an extra.
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
        """Listens, and is healthy. number: of the port, 0 for any. Returns the port. Raises ConfigError."""
        port = listen(self._server, host, number, self._credentials)
        self._looking = asyncio.create_task(self._admission.keep_looking())
        await self._server.start()
        self.servicer.counters.beat()
        self.servicer.counters.front_ends = 1
        self._health.set_serving(True)
        self._engine.tell_of_silence(lambda is_silent: self._health.set_ready(not is_silent))
        return port

    async def wait_ended(self) -> str:
        """Returns when the server takes no more calls, and why: nobody has asked for that before `stop`."""
        try:
            # Whoever stops waiting must not cancel what the library waits for when it is stopped.
            await asyncio.shield(self._server.wait_for_termination())
        except Exception as error:  # the library's, whatever it is
            return type(error).__name__
        return "it has stopped"

    def take_stock(self) -> None:
        """Puts on the board what is looked at now and then, and not counted as it changes."""
        self.servicer.counters.beat()
        self.servicer.counters.unread_bytes = self._engine.unread_bytes
        self.servicer.counters.waiting_structures = self.servicer.waiting_structures
        texts = 0 if self._tokenizer is None else self._tokenizer.waiting
        self.servicer.counters.waiting_texts = texts + self.servicer.waiting_chats

    def engine_lost(self) -> None:
        """No longer healthy. New calls end with UNAVAILABLE, as the open ones did."""
        self._health.set_serving(False)

    def hurry(self) -> None:
        """Ends the grace of a stop that is under way, or of the one that comes."""
        self._hurried.set()

    async def stop(self, grace_s: float) -> None:
        """Takes no more completions, gives the open ones `grace_s` seconds, and ends the rest with UNAVAILABLE, and so
        whatever other call is open then.

        Until then the port stays open, so that new calls are told the reason, SHUTDOWN, too.
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
        self._looking.cancel()
