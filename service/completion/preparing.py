"""From a checked request to one that the engine has been sent: its prompt's tokens, and its stream."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.service.calls.admission import Account
from runahead.service.completion.prompt_events import check_once_prompt
from runahead.service.completion.texts import Texts
from runahead.service.contract.validation import CheckedRequest
from runahead.service.engine.engine_client import EngineClient
from runahead.service.engine.request_stream import RequestStream
from runahead.service.text.token_bytes import TokenBytes

_NO_TOKENS: Final = np.zeros(0, np.int32)


class Preparing:
    """table: the bytes of tokens."""

    def __init__(self, engine: EngineClient, texts: Texts, table: TokenBytes) -> None:
        self._engine = engine
        self._texts = texts
        self._table = table

    async def submitted(
        self, request: CheckedRequest, account: Account, *, once: bool
    ) -> tuple[RequestStream, NDArray[np.int32]]:
        """The stream of the request, to be released, and its prompt's tokens, int32 [n]. once: all that is sent back of
        them is one message.

        While a long text waits for the tokenizer, the engine knows the request by its id, so that it can be aborted and
        nobody else can have the id. If it ends meanwhile, its stream has ended, and there are no tokens.
        Raises ServiceError (INVALID_ARGUMENT) or EngineLostError.
        """
        text, special = request.prompt, request.add_special_tokens
        if not isinstance(text, str) or self._texts.tokenizes_at_once(text):
            prompt = await self._texts.prompt(text, special, account) if isinstance(text, str) else text
            self._check(request, prompt, once)
            return self._engine.submit(request, prompt), prompt
        self._texts.check_can_fit(text)
        stream = self._engine.announce(request)
        try:
            made = await stream.unless_ended(self._texts.prompt(text, special, account))
            if made is None:
                return stream, _NO_TOKENS
            self._check(request, made, once)
            return self._engine.submit(request, made, stream), made
        except BaseException:
            self._engine.release(stream)
            raise

    def _check(self, request: CheckedRequest, prompt: NDArray[np.int32], once: bool) -> None:
        if once:
            check_once_prompt(request, prompt, self._table)
