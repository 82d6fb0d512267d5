"""From a checked request to one that the engine has been sent: its prompt's tokens, its grammar, and its stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.service.calls.admission import Account
from runahead.service.completion.prompt_events import check_once_prompt
from runahead.service.completion.texts import Texts
from runahead.service.contract.validation import CheckedRequest
from runahead.service.engine.engine_client import EngineClient
from runahead.service.engine.request_stream import RequestStream
from runahead.service.structures.structures import Structures
from runahead.service.text.token_bytes import TokenBytes

_NO_TOKENS: Final = np.zeros(0, np.int32)


class Preparing:
    """table: the bytes of tokens."""

    def __init__(self, engine: EngineClient, texts: Texts, structures: Structures, table: TokenBytes) -> None:
        self._engine = engine
        self._texts = texts
        self._structures = structures
        self._table = table

    async def submitted(
        self, request: CheckedRequest, account: Account, *, once: bool
    ) -> tuple[RequestStream, NDArray[np.int32]]:
        """The stream of the request, to be released, and its prompt's tokens, int32 [n]. once: all that is sent back of
        them is one message.

        While a long text waits for the tokenizer, or a structure to be compiled, the engine knows the request by its
        id, so that it can be aborted and nobody else can have the id. If it ends meanwhile, its stream has ended, and
        there are no tokens. Raises ServiceError, INVALID_ARGUMENT or what `Structures.grammar` raises, or
        EngineLostError.
        """
        text, structure = request.prompt, request.structure
        is_short = not isinstance(text, str) or self._texts.tokenizes_at_once(text)
        if is_short and (structure is None or self._structures.is_known(structure)):
            ready, prompt = await self._prepared(request, account, once)
            return self._engine.submit(ready, prompt), prompt
        if isinstance(text, str):
            self._texts.check_can_fit(text)
        stream = self._engine.announce(request)
        try:
            made = await stream.unless_ended(self._prepared(request, account, once))
            if made is None:
                return stream, _NO_TOKENS
            ready, prompt = made
            return self._engine.submit(ready, prompt, stream), prompt
        except BaseException:
            self._engine.release(stream)
            raise

    async def _prepared(
        self, request: CheckedRequest, account: Account, once: bool
    ) -> tuple[CheckedRequest, NDArray[np.int32]]:
        """The request with its grammar, and its prompt's tokens, int32 [n]."""
        if request.structure is not None:
            request = replace(request, grammar=await self._structures.grammar(request.structure, account.number))
        text = request.prompt
        prompt = await self._texts.prompt(text, request.add_special_tokens, account) if isinstance(text, str) else text
        if once:
            check_once_prompt(request, prompt, self._table)
        return request, prompt
