"""What the service does with its tokenizer: each text counts as work, and callers take turns."""

from __future__ import annotations

import asyncio
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.wire.messages import EngineInfo
from runahead.service.calls.admission import Account, Admission
from runahead.service.contract.errors import no_tokenizer
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import (
    check_detokenize,
    check_prompt_tokens,
    check_tokenize,
)
from runahead.service.shared_memory.held import Resource
from runahead.service.text.text_bounds import check_can_fit
from runahead.service.text.tokenizer import TextTokenizer
from runahead.v1 import DetokenizeRequest, TokenizeRequest, TokenizeResponse

_ID_BYTES: Final = 4  # what an id counts that is turned into text
_IDS_AT_ONCE: Final = 1 << 14  # that are put into an answer before other calls have their turn: a millisecond


class Texts:
    """tokenizer: None where the service has none, and each method raises ServiceError (FAILED_PRECONDITION). info: of
    the engine."""

    def __init__(self, tokenizer: TextTokenizer | None, admission: Admission, info: EngineInfo) -> None:
        self._tokenizer = tokenizer
        self._admission = admission
        self._info = info

    async def prompt(self, text: str, add_special_tokens: bool, account: Account) -> NDArray[np.int32]:
        """The tokens of a prompt, int32 [n], for which there is room already. Raises ServiceError (INVALID_ARGUMENT)
        where they are too many, as far as can be before they are counted."""
        self.check_can_fit(text)
        prompt = await self._there().encode(text, add_special_tokens, account.number)
        check_prompt_tokens(prompt, "text", self._info)
        return prompt

    def check_can_fit(self, text: str) -> None:
        """Raises ServiceError (INVALID_ARGUMENT) for a text of too many tokens, whatever they are."""
        check_can_fit(text, self._there().longest_token_bytes, self._info)

    def tokenizes_at_once(self, text: str) -> bool:
        """It is so short that `prompt` does not wait for anything."""
        return self._there().encodes_at_once(text)

    async def tokenize(self, request: TokenizeRequest, account: Account, response: TokenizeResponse) -> None:
        """Fills the response. Raises ServiceError, for want of room too."""
        work = max(LIMITS.work_bytes, text_bytes(request.text))
        with self._admission.holding(account, {Resource.TOKENIZING_BYTES: work}):
            check_tokenize(request)
            special = request.add_special_tokens or not request.HasField("add_special_tokens")
            ids = await self._there().encode(request.text, special, account.number)
            for begin in range(0, len(ids), _IDS_AT_ONCE):
                response.token_ids.extend(ids[begin : begin + _IDS_AT_ONCE].tolist())
                await asyncio.sleep(0)  # a long answer takes turns with other calls

    async def detokenize(self, request: DetokenizeRequest, account: Account) -> str:
        """Raises ServiceError, for want of room too."""
        work = max(LIMITS.work_bytes, _ID_BYTES * len(request.token_ids))
        with self._admission.holding(account, {Resource.TOKENIZING_BYTES: work}):
            check_detokenize(request, self._info.vocab_size)
            return await self._there().decode(request.token_ids, request.include_special_tokens, account.number)

    def _there(self) -> TextTokenizer:
        if self._tokenizer is None:
            raise no_tokenizer()
        return self._tokenizer


def text_bytes(text: str) -> int:
    """Of UTF-8."""
    return len(text.encode())
