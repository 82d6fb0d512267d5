"""`GenerationService`: the implementation of each method."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from runahead.service.calls.admission import Account, Admission, current_caller
from runahead.service.calls.call import Call, StreamWriter, current_call
from runahead.service.chat.chats import Chats
from runahead.service.completion.completion import Completion
from runahead.service.completion.events import PromptEvents
from runahead.service.completion.preparing import OpenCompletion, Preparing, Texts, so_far, text_bytes
from runahead.service.contract.errors import ServiceError
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import (
    AnyGenerateRequest,
    CheckedRequest,
    check_known,
    check_once,
    check_request,
    each_alone,
    owned_by,
)
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import (
    RequestRefusedError,
    RequestStream,
    SlowReaderError,
    StalledReaderError,
)
from runahead.service.servicers.control_servicer import OperatorServicer
from runahead.service.servicers.model_info import model_info
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import Board
from runahead.service.shared_memory.call_tables import Holding, Resource
from runahead.service.stats.stats import StatsFeed
from runahead.service.structures.structures import Structures
from runahead.service.text.text import NO_TOKENS
from runahead.service.text.tokenizer import TextTokenizer
from runahead.v1 import (
    Accepted,
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateOnceRequest,
    GenerateOnceResponse,
    GenerateRequest,
    GenerateResponse,
    GetModelInfoRequest,
    GetModelInfoResponse,
    RenderChatRequest,
    RenderChatResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from runahead.v1 import Completion as WholeCompletion

_Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(OperatorServicer):
    """Serves one engine.

    tokenizer: None limits the service to token ids and refuses text.
    board, index: all front ends' figures and this one's line. admission: of that line. version: the server's.
    """

    def __init__(
        self,
        engine: SocketEngineClient,
        tokenizer: TextTokenizer | None,
        settings: FrontEndSettings,
        *,
        board: Board,
        index: int = 0,
        version: str = "",
        admission: Admission,
    ) -> None:
        self.counters = admission.line
        super().__init__(engine, StatsFeed(engine, board, self.counters, version, settings.stalled_stream_s))
        self._settings = settings
        self._tokenizer = tokenizer
        self._token_bytes = NO_TOKENS if tokenizer is None else tokenizer.token_bytes
        self._closed = False
        self._drained = asyncio.Event()
        self._board = board
        self._admission = admission
        self._chats = Chats(tokenizer, engine.info)
        self._texts = Texts(tokenizer, self._chats, admission, engine.info)
        self._structures = Structures(engine.info, settings, self.counters)
        self._preparing = Preparing(engine, self._texts, self._chats, self._structures, self._token_bytes)
        self.counters.answered_by = index + 1

    def close(self) -> None:
        """Refuse new completions with UNAVAILABLE, reason SHUTDOWN. Open ones continue; watchers of the figures are
        notified at once.
        """
        self._closed = True
        self._feed.close()
        self._admission.close()
        self._note_drained()

    async def wait_drained(self) -> None:
        """Wait until the servicer is closed and no completion is open."""
        await self._drained.wait()

    def take_stock(self) -> None:
        """Publish sampled figures on the board."""
        self.counters.beat()
        self.counters.unread_bytes = self._engine.unread_bytes
        self.counters.waiting_structures = self._structures.waiting
        texts = 0 if self._tokenizer is None else self._tokenizer.waiting
        self.counters.waiting_texts = texts + self._chats.waiting

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait for a row, of all front ends."""
        return int(self._board.held.in_all()[Resource.QUEUED_TOKENS])

    async def end(self) -> None:
        """End the worker processes."""
        await self._structures.close()
        await self._chats.close()

    async def Generate(self, request: GenerateRequest, context: _Context) -> None:
        async with StreamWriter(context, self._settings.stalled_stream_s) as writer, self._in_time():
            streaming = self._stream(request, context, writer)
            del request  # the status of an unread stream may wait here for as long as its connection lasts
            await streaming

    async def _stream(self, request: GenerateRequest, context: _Context, writer: StreamWriter) -> None:
        async with self._open(request, context) as opened:
            await writer.begin(current_call().trace.headers)
            opened.interrupt_writes()
            await writer.write(GenerateResponse(accepted=opened.accepted))
            async for prompt in opened.prompt_events():
                await writer.write(GenerateResponse(prompt=prompt))
            while (event := await opened.next_event()) is not None:
                if not opened.is_over:
                    await writer.write(event)
                    continue
                with suppress(StalledReaderError):  # the library has everything: nothing follows the end
                    await writer.write(event)

    async def GenerateOnce(self, request: GenerateOnceRequest, context: _Context) -> GenerateOnceResponse:
        response = GenerateOnceResponse()
        async with self._in_time(), self._open(request, context) as opened:
            async for prompt in opened.prompt_events():
                response.prompt.tokens.extend(prompt.tokens)
                await asyncio.sleep(0)  # other tasks run between parts of a long prompt
            texts: list[list[str]] = [[] for _ in range(opened.n)]
            whole: list[GenerateOnceResponse | WholeCompletion] = [response]
            whole += (response.more.add() for _ in range(opened.n - 1))
            while (event := await opened.next_event()) is not None:
                if event.HasField("finished"):
                    whole[event.finished.index].finished.CopyFrom(event.finished)
                else:
                    texts[event.delta.index].append(event.delta.text)
                    whole[event.delta.index].tokens.extend(event.delta.tokens)
            for one, text in zip(whole, texts, strict=True):
                one.text = "".join(text)
            response.accepted.CopyFrom(opened.accepted)
        return response

    async def GetModelInfo(self, request: GetModelInfoRequest, context: _Context) -> GetModelInfoResponse:
        check_known(request)
        chat_ends = await self._chats.end_token_ids() if self._chats.are_served else None
        return model_info(self._engine.info, self._engine.server_id, self._tokenizer, self._settings, chat_ends)

    async def Tokenize(self, request: TokenizeRequest, context: _Context) -> TokenizeResponse:
        return await self._texts.tokenize(request, self._admission.account(context))

    async def RenderChat(self, request: RenderChatRequest, context: _Context) -> RenderChatResponse:
        return await self._texts.render(request, self._admission.account(context))

    async def Detokenize(self, request: DetokenizeRequest, context: _Context) -> DetokenizeResponse:
        return DetokenizeResponse(text=await self._texts.detokenize(request, self._admission.account(context)))

    # ------------------------------------------------------------ a completion, from its call to its end

    @asynccontextmanager
    async def completing(self, request: GenerateRequest, context: _Context) -> AsyncIterator[OpenCompletion]:
        """Open a completion for another service of this server, under the same rules."""
        async with self._in_time(), self._open(request, context) as opened:
            yield opened

    @asynccontextmanager
    async def _open(self, request: AnyGenerateRequest, context: _Context) -> AsyncIterator[OpenCompletion]:
        """Submit a request, and release it in the engine however the body ends."""
        account, call = self._admission.account(context), current_call()
        with self._reserved(request, account) as holding:
            stream, checked, prompt = await self._submit(request, call, account, holding)
            holding.keep(Resource.TOKENIZING_BYTES)
            holding.keep(Resource.QUEUED_TOKENS, len(prompt) * checked.n)
            for one in stream.completions:
                one.tell_of_admission(partial(holding.give_back, Resource.QUEUED_TOKENS, len(prompt)))
            events = PromptEvents(checked, prompt, self._token_bytes)
            completions = [
                Completion(one, len(prompt), self._token_bytes, stream.submitted_at) for one in each_alone(checked)
            ]
            call.submit(len(prompt), stream.submitted_at)
            try:
                await stream.accepted()
                accepted = Accepted(
                    request_id=checked.request_id, server_id=self._engine.server_id, prompt_tokens=len(prompt)
                )
                yield OpenCompletion(self._engine, stream, events, completions, accepted)
            except RequestRefusedError as refused:
                raise self._refused(refused) from None
            except StalledReaderError:
                self.counters.slow_readers += 1
                raise
            except asyncio.CancelledError:
                if (failure := stream.failure) is None:
                    raise
                _task().uncancel()
                raise (self._refused(failure) if isinstance(failure, RequestRefusedError) else failure) from None
            finally:
                self._engine.release(stream)
                has_finished = all(one.finished is not None for one in completions)
                call.note(has_finished, so_far(completions, stream))
                if (admitted := stream.admitted) is not None:
                    call.note_wait(admitted.waited_for.name.lower(), admitted.waited_s)
                ends = [one.finished for one in stream.completions if one.finished is not None]
                call.evictions, call.pauses = sum(end.evictions for end in ends), sum(end.pauses for end in ends)
                call.chunks_deferred = sum(end.chunks_deferred for end in ends)
                self.counters.stop_strings += sum(one.stopped_by_string for one in completions)
                self.counters.slow_readers += isinstance(stream.failure, SlowReaderError)

    def _refused(self, refused: RequestRefusedError) -> Exception:
        """Count a refusal of the engine and return the call's error."""
        self.counters.refused += 1
        if refused.code == "RESOURCE_EXHAUSTED":
            return self._admission.queue_full(refused.message, self._engine.info.max_queue)
        return refused

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Limit the body's time. Raises ServiceError (DEADLINE_EXCEEDED)."""
        try:
            async with asyncio.timeout(self._settings.max_completion_s):
                yield
        except TimeoutError:
            sentence = f"the completion has taken {self._settings.max_completion_s:g} s, and none may take longer"
            raise ServiceError("TOO_LONG", sentence) from None

    @contextmanager
    def _reserved(self, request: AnyGenerateRequest, account: Account) -> Iterator[Holding]:
        """Hold a completion's amounts before its text is read. Raises the errors of `Admission.holding`.

        A text's token count is unknown yet: at most one for each byte, at most the context. A chat counts its message
        for now. Each completion counts the prompt.
        """
        size = text_bytes(request.text) if request.HasField("text") else request.chat.ByteSize()
        tokens = min(size or len(request.token_ids.ids), self._engine.info.context_length)
        streams = min(max(request.n, 1), LIMITS.completions)  # a larger n is refused by validation
        queued = tokens * streams
        wanted = {Resource.STREAMS: streams, Resource.QUEUED_TOKENS: queued, Resource.TOKENIZING_BYTES: size}
        try:
            with self._admission.holding(account, wanted) as holding:
                yield holding
        finally:
            self._note_drained()

    def _note_drained(self) -> None:
        if self._closed and self.counters.open_streams == 0:
            self._drained.set()

    async def _submit(
        self, request: AnyGenerateRequest, call: Call, account: Account, holding: Holding
    ) -> tuple[RequestStream, CheckedRequest, NDArray[np.int32]]:
        """Submit the request. Returns its stream, to be released by the caller, the request and its prompt's tokens,
        int32 [n]. Raises ServiceError (INVALID_ARGUMENT) or EngineLostError.
        """
        try:
            once = isinstance(request, GenerateOnceRequest)
            if isinstance(request, GenerateOnceRequest):
                check_once(request)
            checked = check_request(request, self._engine.info, has_tokenizer=self._tokenizer is not None)
            call.request_id = checked.request_id
            owned = owned_by(current_caller(), checked, shares_prefixes=self._settings.share_prefix_cache)
            return await self._preparing.submitted(owned, account, holding, once=once)
        except ServiceError:
            self.counters.refused += 1
            raise


def _task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
