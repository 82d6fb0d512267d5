"""Prepares a checked request for the engine: tokenizes its prompt, compiles its grammar and submits it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from runahead.service.calls.admission import Account
from runahead.service.calls.call import current_call
from runahead.service.chat.chats import Chats
from runahead.service.completion.prompt_events import check_once_prompt
from runahead.service.completion.texts import Texts
from runahead.service.contract.chat import CheckedChat
from runahead.service.contract.validation import CheckedRequest, check_chat_ends
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import RequestStream
from runahead.service.shared_memory.held import Holding
from runahead.service.structures.structures import Structures
from runahead.service.text.token_bytes import TokenBytes

_NO_TOKENS: Final = np.zeros(0, np.int32)


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
