"""Prepares requests and submits them: tokenizes texts, renders chats, compiles structures.

Each text counts against the limits, and callers take turns.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from string import ascii_lowercase
from typing import Final

import msgspec
import numpy as np
from google.protobuf.internal.containers import RepeatedScalarFieldContainer
from numpy.typing import NDArray

from runahead.runtime.wire.messages import EngineInfo
from runahead.runtime.wire.parameters import FinishReason as EngineReason
from runahead.service.calls.admission import Account, Admission
from runahead.service.calls.call import current_call
from runahead.service.chat.chats import Chats
from runahead.service.completion.completion import Completion
from runahead.service.completion.events import PromptEvents, check_once_prompt
from runahead.service.contract.errors import ServiceError, Violation, invalid_argument, no_tokenizer
from runahead.service.contract.inputs import CheckedChat, check_detokenize, check_render_chat, check_tokenize
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import CheckedRequest, check_chat_ends, check_prompt_tokens
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import RequestStream
from runahead.service.shared_memory.call_tables import Holding, Resource
from runahead.service.structures.structures import Structures
from runahead.service.text.text import TokenBytes
from runahead.service.text.tokenizer import TextTokenizer, check_can_fit
from runahead.v1 import (
    Accepted,
    DetokenizeRequest,
    Finished,
    GenerateResponse,
    Prompt,
    RenderChatRequest,
    RenderChatResponse,
    TokenizeRequest,
    TokenizeResponse,
)

_ID_BYTES: Final = 4  # counted for an id that is turned into text
_LETTERS: Final = f"{ascii_lowercase}ƿ"
_IDS_AT_ONCE: Final = 1 << 14  # ids put into an answer before other tasks run: about a millisecond

_NO_TOKENS: Final = np.zeros(0, np.int32)


class Texts:
    """Tokenizes and detokenizes. tokenizer: None if the service has none; each method then raises ServiceError
    (FAILED_PRECONDITION). info: the engine's.
    """

    def __init__(self, tokenizer: TextTokenizer | None, chats: Chats, admission: Admission, info: EngineInfo) -> None:
        self._chats = chats
        self._tokenizer = tokenizer
        self._admission = admission
        self._info = info

    async def prompt(
        self, text: str, add_special_tokens: bool, account: Account, field: str = "text"
    ) -> NDArray[np.int32]:
        """Tokenize a prompt that already has its room, int32 [n]. field: the text's path. Raises ServiceError
        (INVALID_ARGUMENT) for too many tokens, before tokenizing if possible.
        """
        self.check_can_fit(text, field)
        prompt = await self._there().encode(text, add_special_tokens, account.number)
        check_prompt_tokens(prompt, field, self._info)
        return prompt

    def check_can_fit(self, text: str, field: str = "text") -> None:
        """Check that the text can fit by its length. Raises ServiceError (INVALID_ARGUMENT)."""
        check_can_fit(text, self._there().longest_token_bytes, self._info, field)

    def tokenizes_at_once(self, text: str) -> bool:
        """Whether the text is so short that `prompt` does not wait."""
        return self._there().encodes_at_once(text)

    async def tokenize(self, request: TokenizeRequest, account: Account) -> TokenizeResponse:
        """Answer `Tokenize`. Raises ServiceError, also without room."""
        response = TokenizeResponse()
        work = max(LIMITS.work_bytes, text_bytes(request.text))
        with self._admission.holding(account, {Resource.TOKENIZING_BYTES: work}):
            check_tokenize(request)
            special = request.add_special_tokens or not request.HasField("add_special_tokens")
            ids = await self._there().encode(request.text, special, account.number)
            await _fill(response.token_ids, ids)
        return response

    async def render(self, request: RenderChatRequest, account: Account) -> RenderChatResponse:
        """Answer `RenderChat`. Raises ServiceError, also without room."""
        response = RenderChatResponse()
        work = max(LIMITS.work_bytes, request.chat.ByteSize())
        with self._admission.holding(account, {Resource.TOKENIZING_BYTES: work}) as holding:
            chat = check_render_chat(request)
            response.text = await self._chats.text(chat, account.number)
            self._admission.hold_more(account, holding, {Resource.TOKENIZING_BYTES: text_bytes(response.text)})
            ids = await self._there().encode(response.text, False, account.number)
            await self._refuse_special(chat, ids, account)
            await _fill(response.token_ids, ids)
        return response

    async def chat_prompt(self, chat: CheckedChat, account: Account, holding: Holding, n: int) -> NDArray[np.int32]:
        """Tokenize a chat's prompt, int32 [tokens]. holding: of its n completions; the rendered text is added. Raises
        the errors of `Chats.text` and `prompt`, and ServiceError without room.
        """
        text = await self._chats.text(chat, account.number)
        size = text_bytes(text)
        queued = min(size, self._info.context_length) * n - holding.amount(Resource.QUEUED_TOKENS)
        more = {Resource.TOKENIZING_BYTES: size, Resource.QUEUED_TOKENS: max(0, queued)}
        self._admission.hold_more(account, holding, more)
        prompt = await self.prompt(text, False, account, "chat")
        await self._refuse_special(chat, prompt, account)
        return prompt

    async def _refuse_special(self, chat: CheckedChat, ids: NDArray[np.int32], account: Account) -> None:
        """Refuse a chat with `refuse_special_tokens` and more special tokens than its template writes for neutral
        texts: the template or a normalizer made them from the chat's texts. Raises ServiceError (INVALID_ARGUMENT).

        ids: the prompt's, int32 [n].
        """
        if not chat.refuse_special_tokens:
            return
        tokenizer = self._there()
        contents = tokenizer.special_tokens
        spelled = "".join(contents.values()).lower()
        letter = next(letter for letter in _LETTERS if letter not in spelled)
        try:
            other = await tokenizer.encode(await self._chats.text(chat, account.number, letter), False, account.number)
        except ServiceError as error:
            if error.reason != "INVALID_FIELD":
                raise
            raise _special(f"can't be checked: with other texts, {error.sentence}") from None
        made = Counter(ids[np.isin(ids, list(contents))].tolist())
        made.subtract(other.tolist())
        for token_id, more in made.items():
            if more > 0:
                raise _special(f"is set, and the texts make the special token {contents[token_id]!r}")

    async def detokenize(self, request: DetokenizeRequest, account: Account) -> str:
        """Detokenize. Raises ServiceError, also without room."""
        work = max(LIMITS.work_bytes, _ID_BYTES * len(request.token_ids))
        with self._admission.holding(account, {Resource.TOKENIZING_BYTES: work}):
            check_detokenize(request, self._info.vocab_size)
            return await self._there().decode(request.token_ids, request.include_special_tokens, account.number)

    def _there(self) -> TextTokenizer:
        if self._tokenizer is None:
            raise no_tokenizer()
        return self._tokenizer


def _special(words: str) -> ServiceError:
    field = "chat.refuse_special_tokens"
    return invalid_argument([Violation(field, f"{field} {words}")])


async def _fill(answer: RepeatedScalarFieldContainer[int], ids: NDArray[np.int32]) -> None:
    """Put ids into an answer. Other tasks run in between for a long one."""
    for begin in range(0, len(ids), _IDS_AT_ONCE):
        answer.extend(ids[begin : begin + _IDS_AT_ONCE].tolist())
        await asyncio.sleep(0)


def text_bytes(text: str) -> int:
    """Return the text's bytes in UTF-8."""
    return len(text.encode())


class Preparing:
    """Prepares and submits requests. table: the bytes of tokens."""

    def __init__(
        self, engine: SocketEngineClient, texts: Texts, chats: Chats, structures: Structures, table: TokenBytes
    ) -> None:
        self._engine = engine
        self._chats = chats
        self._texts = texts
        self._structures = structures
        self._table = table

    async def submitted(
        self, request: CheckedRequest, account: Account, holding: Holding, *, once: bool
    ) -> tuple[RequestStream, CheckedRequest, NDArray[np.int32]]:
        """Return the request's stream, to be released by the caller, the request as submitted, and its prompt's tokens,
        int32 [n]. holding: what the request holds; a chat's prompt is added. once: the prompt's tokens are sent back in
        one message.

        The engine knows the request by its id while text is tokenized, a chat is rendered or a structure is compiled,
        so that it can be aborted and its id is taken. If it ends meanwhile, its stream has ended and there are no
        tokens. Raises ServiceError (INVALID_ARGUMENT, and the errors of `Structures.grammar` and `Chats.text`) or
        EngineLostError.
        """
        given, structure = request.prompt, request.structure
        if isinstance(given, CheckedChat):
            self._chats.require()
        is_short = self._texts.tokenizes_at_once(given) if isinstance(given, str) else isinstance(given, np.ndarray)
        if is_short and (structure is None or self._structures.is_known(structure)):
            ready, prompt = await self._prepared(request, account, holding, once)
            return self._engine.submit(ready, prompt), ready, prompt
        if isinstance(given, str):
            self._texts.check_can_fit(given)
        stream = self._engine.announce(request)
        try:
            made = await stream.unless_ended(self._prepared(request, account, holding, once))
            if made is None:
                return stream, request, _NO_TOKENS
            ready, prompt = made
            return self._engine.submit(ready, prompt, stream), ready, prompt
        except BaseException:
            self._engine.release(stream)
            raise

    async def _prepared(
        self, request: CheckedRequest, account: Account, holding: Holding, once: bool
    ) -> tuple[CheckedRequest, NDArray[np.int32]]:
        """Return the request with its grammar and a chat's ends, and its prompt's tokens, int32 [n]."""
        call, given = current_call(), request.prompt
        if request.structure is not None:
            with call.waiting_for("structure"):
                request = replace(request, grammar=await self._structures.grammar(request.structure, account.number))
        if isinstance(given, CheckedChat):
            with call.waiting_for("chat"):
                prompt = await self._texts.chat_prompt(given, account, holding, request.n)
                request = with_turn_ends(request, await self._chats.end_token_ids())
            check_chat_ends(request)
        elif isinstance(given, str):
            with call.waiting_for("tokenizer"):
                prompt = await self._texts.prompt(given, request.add_special_tokens, account)
        else:
            prompt = given
        if once:
            check_once_prompt(request, prompt, self._table)
        return request, prompt


def with_turn_ends(request: CheckedRequest, ends: tuple[int, ...]) -> CheckedRequest:
    """Add a chat's end tokens to the request's stop tokens, unless it ignores end-of-sequence tokens."""
    own = request.stopping.stop_token_ids
    added = tuple(token_id for token_id in ends if token_id not in own)
    if request.stopping.ignore_eos or not added:
        return request
    return replace(
        request,
        stopping=msgspec.structs.replace(request.stopping, stop_token_ids=tuple(sorted({*own, *added}))),
        text=replace(request.text, turn_ends=added),
    )


class OpenCompletion:
    """One request with one or more completions, by index. stream: the first one's; `RequestStream.completions` has
    all.
    """

    def __init__(
        self,
        engine: SocketEngineClient,
        stream: RequestStream,
        prompt: PromptEvents,
        completions: Sequence[Completion],
        accepted: Accepted,
    ) -> None:
        self._engine = engine
        self._stream = stream
        self._prompt = prompt
        self._completions = completions
        self._streams = stream.completions
        self._open = list(range(len(completions)))  # indexes whose end was not sent, next turn first
        self.accepted = accepted

    @property
    def n(self) -> int:
        """The number of completions."""
        return len(self._completions)

    @property
    def is_over(self) -> bool:
        """Whether the end of each completion was taken."""
        return not self._open

    def cached_tokens(self, index: int) -> int:
        """Return this completion's prompt tokens from the prefix cache; 0 before that is known."""
        admitted = self._streams[index].admitted
        return admitted.cached_tokens if admitted else 0

    def interrupt_writes(self) -> None:
        """Let a failure of the streams cancel a write that is stuck on a client that does not read.

        Call it once the headers are sent: no status can be sent before.
        """
        task = asyncio.current_task()
        assert task is not None
        self._stream.interrupt_with(task.cancel)

    async def prompt_events(self) -> AsyncIterator[Prompt]:
        """Yield the prompt's tokens if requested, as the engine describes them. Take them before any delta.

        Incomplete if the request ends first. Raises the errors of `RequestStream.take_prompt`.
        """
        for event in self._prompt.without_logprobs():
            yield event
        while (part := await self._stream.take_prompt()) is not None:
            for event in self._prompt.with_logprobs(part):
                yield event

    async def next_event(self) -> GenerateResponse | None:
        """Wait for the next delta of a completion, with all tokens that are ready and fit, or for its end. Completions
        take turns. None after the last end.

        Raises the errors of `RequestStream.take` and `Completion.fill`.
        """
        while self._open:
            for turn, index in enumerate(self._open):
                event = await self._event_of(index)
                if event is not None:
                    del self._open[turn]
                    if not event.HasField("finished"):
                        self._open.append(index)
                    return event
            await self._stream.wait()
        return None

    async def _event_of(self, index: int) -> GenerateResponse | None:
        """Return this completion's next event, or None if nothing is ready."""
        completion, stream = self._completions[index], self._streams[index]
        while completion.has_room and stream.has_more:
            completion.add(await stream.take())
            if completion.finished is not None:
                # Before the end is written: an open stream could fail meanwhile, and an error would follow the end.
                self._engine.release_one(stream, EngineReason.STOP)
        event = GenerateResponse()
        try:
            if completion.fill(event.delta):
                event.delta.index = index
                return event
        except ServiceError as error:
            raise error.at_index(index) if len(self._completions) > 1 else error from None
        if completion.finished is None:
            return None
        completion.finished.index = index
        return GenerateResponse(finished=completion.finished)


def so_far(completions: Sequence[Completion], stream: RequestStream) -> Finished:
    """Return a request's usage and times with its first completion's end; tokens count over all completions."""
    parts = [one.so_far(of.admitted) for one, of in zip(completions, stream.completions, strict=True)]
    found = Finished()
    found.CopyFrom(parts[0])
    found.usage.completion_tokens = sum(part.usage.completion_tokens for part in parts)
    return found
