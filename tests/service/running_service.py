"""A front end over a fake engine, reached over a real port."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import msgspec
from tokenizers import Tokenizer

from runahead.service.calls.admission import Access
from runahead.service.calls.call import Traces
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.servers.serve_front_end import FrontEnd
from runahead.service.servers.supervised import Security
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.text.tokenizer import TextTokenizer
from runahead.v1 import GenerationServiceStub
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.small_tokenizers import byte_level_tokenizer


@dataclass
class Service:
    """A front end on an event loop of its own thread. Tests talk to it as clients do."""

    engine: FakeEngine
    socket: Path
    max_streams: int = 16
    settings: FrontEndSettings = field(default_factory=FrontEndSettings)
    security: Security = field(default_factory=lambda: Security(Access(), None))
    traces: Traces | None = None
    chat_template: str = "{{ messages }}"
    tokenizer: Tokenizer | None = None  # None: `byte_level_tokenizer`
    channel_credentials: grpc.ChannelCredentials | None = None
    host: str = "127.0.0.1"
    port: int = 0  # any that is free
    front_end: FrontEnd = field(init=False, repr=False)
    _loop: asyncio.AbstractEventLoop = field(init=False, repr=False)
    _ready: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Service:
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S)
        self.channel = self.connect()
        self.stub = GenerationServiceStub(self.channel)
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        with suppress(RuntimeError):  # the loop is closed where the front end has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        self.engine.close()

    def connect(self, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
        """A channel with a connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        credentials = credentials or self.channel_credentials
        if credentials is None:
            return grpc.insecure_channel(f"{self.host}:{self.port}", options)
        return grpc.secure_channel(f"{self.host}:{self.port}", credentials, options)

    def stop(self, grace_s: float) -> None:
        """Begins a graceful stop, and returns at once."""
        self._grace_s = grace_s
        self._loop.call_soon_threadsafe(self._stop.set)

    def call(self, function: object, *arguments: object) -> None:
        """Runs a function on the front end's loop."""
        self._loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]

    async def _serve(self) -> None:
        self._loop, self._stop, self._grace_s = asyncio.get_running_loop(), asyncio.Event(), 0.0
        tokenizer = TextTokenizer(
            self.tokenizer or byte_level_tokenizer(),
            {"default": self.chat_template} if self.chat_template else {},
            {"eos_token": "<|end|>"},
        )
        client = await SocketEngineClient.connect(self.socket)
        settings = msgspec.structs.replace(self.settings, max_streams=self.max_streams)
        self.front_end = FrontEnd(client, tokenizer, settings, self.security, traces=self.traces)
        self.port = await self.front_end.start(self.host, self.port)
        self._ready.set()
        await self._stop.wait()
        await self.front_end.stop(self._grace_s)
        await tokenizer.close()
