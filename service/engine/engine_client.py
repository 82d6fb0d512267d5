"""The front end's end of the connection to the engine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
from numpy.typing import NDArray

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.figures import EngineStats, Trace
from runahead.runtime.wire.frames import FrameReader, ProtocolError
from runahead.runtime.wire.kv_events import KvQuery, KvReply
from runahead.runtime.wire.parameters import FinishReason
from runahead.runtime.wire.prompts import prepared_submit
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import CheckedRequest
from runahead.service.engine.pulse import SILENT_S, Pulse
from runahead.service.engine.request_stream import EngineLostError, RequestRefusedError, RequestStream, Waking

log = structlog.get_logger(__name__)

_LOST_SENTENCE: Final = "the engine has stopped; the request may be sent again to another server"
_SILENT_SENTENCE: Final = "the engine does not answer at the moment; it may come back, or be stopped"


class SocketEngineClient(asyncio.Protocol):
    """The engine behind its Unix socket, as servicers use it.

    counters_from: the first handle and call are one more. silent_s: after how long without messages an engine is
    silent.
    """

    def __init__(self, counters_from: int = 0, silent_s: float = SILENT_S) -> None:
        loop = asyncio.get_running_loop()
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._welcome: asyncio.Future[m.Welcome] = loop.create_future()
        self._lost: asyncio.Future[EngineLostError] = loop.create_future()
        self._streams: dict[int, RequestStream] = {}
        self._announced = set[int]()  # announced, neither submitted nor released
        self._calls: dict[int, asyncio.Future[Any]] = {}  # stay open while the engine is silent
        self._brief_calls: dict[int, asyncio.Future[Any]] = {}  # fail when the engine falls silent
        self._last_handle = self._last_call = counters_from
        self._pulse = Pulse(silent_s, self._on_silence)
        self._waking = Waking()
        self._tell_of_silence: Callable[[bool], None] = lambda is_silent: None
        self.info: m.EngineInfo
        self.server_id = ""

    @classmethod
    async def connect(
        cls, path: Path, timeout_s: float = 30.0, counters_from: int = 0, silent_s: float = SILENT_S
    ) -> SocketEngineClient:
        """Connect and exchange greetings. Raises EngineLostError without an engine or with another protocol version."""
        client = cls(counters_from, silent_s)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().create_unix_connection(lambda: client, os.fspath(path))
                client._send(m.Hello(m.PROTOCOL_VERSION))
                welcome = await client._welcome
        except (OSError, TimeoutError) as error:
            message = f"the engine could not be reached: {str(error) or 'it did not answer'}"
            client.close("CONNECT", message)
            raise EngineLostError("CONNECT", message) from error
        if welcome.protocol != m.PROTOCOL_VERSION:
            message = f"the engine speaks protocol {welcome.protocol}, and this front end {m.PROTOCOL_VERSION}"
            client.close("PROTOCOL", message)
            raise EngineLostError("PROTOCOL", message)
        client.info, client.server_id = welcome.info, welcome.server_id
        return client

    # ------------------------------------------------------------ calls

    def announce(self, request: CheckedRequest) -> RequestStream:
        """Reserve a request's id while its prompt is prepared: the returned stream ends if the request is aborted or
        refused. Submit or release it. Never blocks. Raises EngineLostError, also if the engine is silent.
        """
        stream = self._new_stream(request.n)
        self._announced.add(stream.handle)
        self._send(m.Announce(stream.handle, request.engine_id or request.request_id, stream.submitted_at, request.n))
        return stream

    def submit(
        self, request: CheckedRequest, prompt: NDArray[np.int32], announced: RequestStream | None = None
    ) -> RequestStream:
        """Send a request. prompt: int32 [n]. announced: its stream if announced; nothing is sent if that has ended.
        Never blocks. Raises EngineLostError, also if the engine is silent.
        """
        if announced is not None and announced.ended:
            return announced
        self._raise_if_lost_or_silent()
        stream = announced or self._new_stream(request.n)
        self._announced.discard(stream.handle)
        stream.expect_prompt(len(prompt) - 1 if request.sampling.prompt_logprobs >= 0 else 0)
        self._send(
            prepared_submit(
                stream.handle,
                request.engine_id or request.request_id,
                prompt,
                request.sampling,
                request.stopping,
                block_size=self.info.block_size if self.info.prefix_cache else 0,
                priority=request.priority,
                cache_salt=request.cache_salt,
                submitted_at=stream.submitted_at if announced is None else time.monotonic(),
                announced=announced is not None,
                structure=request.grammar,
                caller=request.caller,
                outranks=request.outranks,
                n=request.n,
            )
        )
        return stream

    def release(self, stream: RequestStream) -> None:
        """Release a request: its streams receive nothing more. Idempotent.

        Unfinished completions are cancelled in the engine.
        """
        # The engine waits for a message about an announced request even if its stream has ended.
        handle = stream.completions[0].handle
        if handle in self._announced:
            self._announced.discard(handle)
            for one in stream.completions:
                self._streams.pop(one.handle, None)
            self._send(m.Cancel(handle, FinishReason.CANCELLED))
            return
        for one in stream.completions:
            self.release_one(one, FinishReason.CANCELLED)

    def release_one(self, stream: RequestStream, reason: FinishReason) -> None:
        """Release one completion's stream of a submitted request. reason: counted by the engine."""
        if self._streams.pop(stream.handle, None) is not None:
            self._send(m.Cancel(stream.handle, reason))

    async def abort(self, request_ids: tuple[str, ...], all_requests: bool, reach: str = "") -> m.AbortResult:
        """Abort requests. reach: id prefix for `all_requests`. Raises EngineLostError, also at once if the engine is
        silent.
        """
        result: m.AbortResult = await self._ask(
            self._calls, lambda call: m.Abort(call, request_ids, all_requests, reach)
        )
        return result

    async def stats(self) -> EngineStats:
        """Ask for the engine's figures. Raises EngineLostError, also at once if the engine is or falls silent."""
        stats: EngineStats = await self._ask(self._brief_calls, m.StatsQuery)
        return stats

    async def trace(self, launches: int) -> Trace:
        """Ask for the trace of the newest `launches` launches. Raises EngineLostError like `stats`."""
        trace: Trace = await self._ask(self._brief_calls, lambda call: m.TraceQuery(call, launches))
        return trace

    async def kv_events(self) -> KvReply:
        """Wait for the next changes of the prefix cache. Each question acknowledges the previous answer, so none may be
        abandoned. Raises EngineLostError, also at once if the engine is silent.
        """
        reply: KvReply = await self._ask(self._calls, KvQuery)
        return reply

    @property
    def unread_bytes(self) -> int:
        """Estimate the bytes that readers have not taken of all streams."""
        return sum(stream.unread_bytes for stream in self._streams.values())

    def tell_of_silence(self, tell: Callable[[bool], None]) -> None:
        """Call `tell` with True when the engine falls silent (at once if it is) and with False when it is heard again,
        until it is lost.
        """
        self._tell_of_silence = tell
        if self._pulse.is_silent:
            tell(True)

    async def wait_lost(self) -> EngineLostError:
        """Wait until the engine is lost, and return the error."""
        return await asyncio.shield(self._lost)

    def close(self, reason: str, sentence: str) -> None:
        """End every stream with EngineLostError, and close the connection."""
        self._lose(EngineLostError(reason, sentence))

    # ------------------------------------------------------------ the connection, called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._pulse.heard()
        try:
            for body in self._frames.feed(data):
                self._dispatch(m.decode_to_front_end(body))
        except ProtocolError as error:
            log.error("engine_protocol_error", error=str(error))
            self._lose(EngineLostError("PROTOCOL", _LOST_SENTENCE))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(EngineLostError("ENGINE_LOST", _LOST_SENTENCE))

    # ------------------------------------------------------------ messages of the engine

    def _dispatch(self, message: m.ToFrontEnd) -> None:
        match message:
            case m.Output():
                self._dispatch_output(message)
            case m.Accepted(handle=handle):
                if stream := self._streams.get(handle):
                    stream.accept()
            case m.Admitted(handle=handle):
                if stream := self._streams.get(handle):
                    stream.admit(message)
            case m.PromptLogprobs(handle=handle):
                stream = self._streams.get(handle)
                if stream is not None and not stream.push_prompt(message):
                    self.release(stream)
            case m.Refused(handle=handle):
                if stream := self._streams.get(handle):
                    for one in stream.completions:
                        self._streams.pop(one.handle, None)
                    stream.fail(RequestRefusedError(message.code, message.message, message.field))
            case m.AbortResult(call=call) | KvReply(call=call):
                _answer(self._calls, call, message)
            case m.StatsReply(call=call, stats=answer) | m.TraceReply(call=call, trace=answer):
                _answer(self._brief_calls, call, answer)
            case m.Failed(reason=reason, message=sentence):
                self._lose(EngineLostError(reason, sentence))
            case m.Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case m.Heartbeat():
                pass  # it counts as a sign of life only

    def _dispatch_output(self, output: m.Output) -> None:
        """Distribute columns to streams. Released handles are skipped."""
        logprobs = {entry.index: entry for entry in output.logprobs}
        if len(output.tokens) % 4 or len(output.handles) != 2 * len(output.tokens):
            raise ProtocolError(
                f"an output has {len(output.handles)} bytes of handles and {len(output.tokens)} of tokens"
            )
        handles = np.frombuffer(output.handles, np.dtype("<i8")).tolist()
        tokens = np.frombuffer(output.tokens, np.dtype("<i4")).tolist()
        streams = self._streams
        for index, (handle, token_id) in enumerate(zip(handles, tokens, strict=True)):
            stream = streams.get(handle)
            if stream is not None and not stream.push(token_id, logprobs.get(index)):
                self.release(stream)
        for finished in output.finished:
            if stream := streams.pop(finished.handle, None):
                stream.finish(finished)

    # ------------------------------------------------------------ internals

    def _new_stream(self, n: int = 1) -> RequestStream:
        """Make the stream of the first of n completions. Raises EngineLostError."""
        self._raise_if_lost_or_silent()
        first: RequestStream | None = None
        for _ in range(n):
            self._last_handle += 1
            stream = RequestStream(
                self._last_handle,
                LIMITS.unread_bytes,
                unread_prompt_bytes=LIMITS.unread_prompt_bytes,
                schedule_wake=self._waking.add,
                first=first,
            )
            self._streams[stream.handle] = stream
            first = first or stream
        assert first is not None
        return first

    def _on_silence(self, is_silent: bool) -> None:
        if is_silent:
            log.warning("engine_silent")
            self._fail(self._brief_calls, EngineLostError("ENGINE_SILENT", _SILENT_SENTENCE))
        else:
            log.info("engine_heard_again")
        self._tell_of_silence(is_silent)

    async def _ask(self, calls: dict[int, asyncio.Future[Any]], question: Callable[[int], m.ToEngine]) -> Any:
        """Ask a question and wait for its answer. question: made with the call's number. Raises EngineLostError."""
        self._raise_if_lost_or_silent()
        self._last_call += 1
        answer = calls[self._last_call] = asyncio.get_running_loop().create_future()
        self._send(question(self._last_call))
        return await answer

    def _fail(self, calls: dict[int, asyncio.Future[Any]], error: EngineLostError) -> None:
        for call in calls.values():
            if not call.done():
                call.set_exception(error.again())
        calls.clear()

    def _send(self, message: m.ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(m.encode_frame(message))

    def _raise_if_lost_or_silent(self) -> None:
        """Refuse new messages to a silent engine: what it does not read stays in this process."""
        if self._lost.done():
            raise self._lost.result().again()
        unsent = self._transport.get_write_buffer_size() if self._transport is not None else 0
        if self._pulse.is_silent or unsent > LIMITS.unsent_bytes:
            raise EngineLostError("ENGINE_SILENT", _SILENT_SENTENCE)

    def _lose(self, error: EngineLostError) -> None:
        """Fail everything that waits with `error`. Idempotent."""
        if self._lost.done():
            return
        self._lost.set_result(error)
        self._pulse.end()
        if self._transport is not None:
            self._transport.close()
        if not self._welcome.done() and self._transport is not None:
            self._welcome.set_exception(error.again())
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error.again())
        self._fail(self._calls, error)
        self._fail(self._brief_calls, error)


def _answer(calls: dict[int, asyncio.Future[Any]], call: int, answer: object) -> None:
    """Answer a call, unless it was abandoned."""
    if (asked := calls.pop(call, None)) and not asked.done():
        asked.set_result(answer)
