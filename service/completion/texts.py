"""Tokenizer work: each text counts against the limits, and callers take turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from string import ascii_lowercase
from typing import Final

import numpy as np
from google.protobuf.internal.containers import RepeatedScalarFieldContainer
from numpy.typing import NDArray

from runahead.runtime.wire.messages import EngineInfo
from runahead.service.calls.admission import Account, Admission
from runahead.service.chat.chats import Chats
from runahead.service.contract.chat import CheckedChat
from runahead.service.contract.errors import ServiceError, Violation, invalid_argument, no_tokenizer
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.text_checks import check_detokenize, check_render_chat, check_tokenize
from runahead.service.contract.validation import (
    check_prompt_tokens,
)
from runahead.service.shared_memory.held import Holding, Resource
from runahead.service.text.text_bounds import check_can_fit
from runahead.service.text.tokenizer import TextTokenizer
from runahead.v1 import DetokenizeRequest, RenderChatRequest, RenderChatResponse, TokenizeRequest, TokenizeResponse

_ID_BYTES: Final = 4  # counted for an id that is turned into text
_LETTERS: Final = f"{ascii_lowercase}ƿ"
_IDS_AT_ONCE: Final = 1 << 14  # ids put into an answer before other tasks run: about a millisecond


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
        contents = {token.token_id: token.content for token in tokenizer.special_tokens}
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
