"""The prompt's tokens as the contract's `prompt` events, each within the bounds of a message."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.wire.messages import PromptLogprobs
from runahead.service.completion.token_messages import scored_token, token_message
from runahead.service.contract.errors import Violation, invalid_argument
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import CheckedRequest
from runahead.service.text.token_bytes import TokenBytes
from runahead.v1 import Prompt, Token

_TOKEN_FRAME_BYTES = 21  # of a Token in a message: tag, length, and fields other than `bytes` and `top`
_FIELD_BYTES = 4  # tag and length of a message in a repeated field
_TOP_FRAME_BYTES = 19  # the same for a TopToken


class PromptEvents:
    """Cuts a request's prompt into events, every token once and in order, if the client asked for any of it.

    prompt: int32 [n].
    """

    def __init__(self, request: CheckedRequest, prompt: NDArray[np.int32], table: TokenBytes) -> None:
        self._prompt = prompt
        self._table = table
        self._echo = request.echo
        self._scored = request.sampling.prompt_logprobs >= 0
        self._bound = request.text.max_tokens_per_message or sys.maxsize

    def without_logprobs(self) -> Iterator[Prompt]:
        """Yield events that need no log-probabilities: with echo alone the whole prompt, otherwise the token of a
        one-token prompt.
        """
        if self._scored and len(self._prompt) > 1:
            return iter(())
        tokens = self._prompt.tolist() if self._scored or self._echo else ()
        return self._cut(0, (token_message(self._table, token_id) for token_id in tokens))

    def with_logprobs(self, part: PromptLogprobs) -> Iterator[Prompt]:
        """Yield the tokens that `part` describes; the first part brings the prompt's first token too, which has no
        log-probability.
        """
        chosen = np.frombuffer(part.chosen, np.dtype("<f4"))
        top_ids = np.frombuffer(part.top_ids, np.dtype("<i4")).reshape(len(chosen), -1)
        top_logprobs = np.frombuffer(part.top_logprobs, np.dtype("<f4")).reshape(len(chosen), -1)
        ids = self._prompt[part.offset : part.offset + len(chosen)]
        columns = zip(ids.tolist(), chosen.tolist(), top_ids.tolist(), top_logprobs.tolist(), strict=True)
        tokens = (scored_token(self._table, *column) for column in columns)
        if part.offset > 1:
            return self._cut(part.offset, tokens)
        return self._cut(0, chain([token_message(self._table, int(self._prompt[0]))], tokens))

    def _cut(self, offset: int, tokens: Iterable[Token]) -> Iterator[Prompt]:
        """Yield events of consecutive tokens from `offset`; only a single long token exceeds the bound."""
        event, size = list[Token](), 0
        for token in tokens:
            token_bytes = token.ByteSize() + _FIELD_BYTES
            if event and (len(event) == self._bound or size + token_bytes > LIMITS.event_bytes):
                yield Prompt(offset=offset, tokens=event)
                offset, event, size = offset + len(event), [], 0
            event.append(token)
            size += token_bytes
        if event:
            yield Prompt(offset=offset, tokens=event)


def check_once_prompt(request: CheckedRequest, prompt: NDArray[np.int32], table: TokenBytes) -> None:
    """Check that the prompt's tokens fit one GenerateOnce message. Raises ServiceError (INVALID_ARGUMENT).

    The top tokens at a position differ, so their total length is at most the sum of the longest ones.
    """
    top = request.sampling.prompt_logprobs
    if top < 0 and not request.echo:
        return
    spelled = sum(len(table.of(token_id)) for token_id in prompt.tolist())
    entries = max(top, 0)
    size = spelled + len(prompt) * (_TOKEN_FRAME_BYTES + entries * _TOP_FRAME_BYTES + sum(table.longest[:entries]))
    if size > LIMITS.once_prompt_bytes:
        field = "output.prompt_logprobs" if top >= 0 else "output.echo"
        sentence = (
            f"may take {size} bytes for this prompt of {len(prompt)} tokens, and GenerateOnce answers with at most "
            f"{LIMITS.once_prompt_bytes} of them; Generate sends them in parts"
        )
        raise invalid_argument([Violation(field, f"{field} {sentence}")])
