"""The contract's messages of a completion: its prompt, within the bounds of a message, its tokens and its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
from google.protobuf.duration_pb2 import Duration
from numpy.typing import NDArray

from runahead.runtime.wire import messages
from runahead.runtime.wire.messages import PromptLogprobs
from runahead.runtime.wire.parameters import FinishReason as EngineReason
from runahead.service.contract.errors import Violation, invalid_argument
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import CheckedRequest
from runahead.service.text.text import TokenBytes
from runahead.v1 import FinishReason, Prompt, Timing, Token, TopToken, Usage

_TOKEN_FRAME_BYTES = 21  # of a Token in a message: tag, length, and fields other than `bytes` and `top`
_FIELD_BYTES = 4  # tag and length of a message in a repeated field
_TOP_FRAME_BYTES = 19  # the same for a TopToken

_REASONS = {
    EngineReason.END_OF_SEQUENCE: FinishReason.FINISH_REASON_END_OF_SEQUENCE,
    EngineReason.STOP: FinishReason.FINISH_REASON_STOP,
    EngineReason.LENGTH: FinishReason.FINISH_REASON_LENGTH,
    EngineReason.CONTEXT_LENGTH: FinishReason.FINISH_REASON_CONTEXT_LENGTH,
    EngineReason.ABORTED: FinishReason.FINISH_REASON_ABORTED,
}


def reason_of(end: messages.Finished, turn_ends: Container[int]) -> FinishReason:
    """Return the contract's finish reason. turn_ends: stop tokens that end a chat's answer, reported as the model's
    end.
    """
    if end.stop_token_id in turn_ends:
        return FinishReason.FINISH_REASON_END_OF_SEQUENCE
    return _REASONS[EngineReason(end.reason)]


def usage(
    end: messages.Finished | None, admitted: messages.Admitted | None, prompt_tokens: int, completion_tokens: int
) -> Usage:
    """Return the usage. end, admitted: the engine's messages, None if not sent. Drafts are unknown before the end."""
    told = end or admitted
    found = Usage(
        prompt_tokens=prompt_tokens,
        cached_tokens=told.cached_tokens if told else 0,
        completion_tokens=completion_tokens,
    )
    if end is not None:
        found.drafted_tokens, found.accepted_tokens = sum(end.drafted), sum(end.accepted)
        found.drafted_by_place.update(enumerate(end.drafted, start=1))
        found.accepted_by_place.update(enumerate(end.accepted, start=1))
        if end.tokens_per_launch:
            found.tokens_per_launch = end.tokens_per_launch
    return found


class CompletionClock:
    """Measures a completion's times. submitted_at: the start, as in the engine's times (`RequestStream`)."""

    def __init__(self, submitted_at: float) -> None:
        self._submitted = submitted_at
        self._first_token: float | None = None
        self._last_token = self._submitted

    def note_tokens(self) -> None:
        """Record that tokens have arrived now."""
        self._last_token = time.monotonic()
        if self._first_token is None:
            self._first_token = self._last_token

    def timing(self, end: messages.Finished | None, admitted: messages.Admitted | None) -> Timing:
        """Return the timing by the engine's clock if it sent its times, else by this one."""
        if end is not None:
            return Timing(
                queue=_duration(end.queue_s),
                prefill=_duration(end.prefill_s),
                first_token=_duration(end.first_token_s),
                decode=_duration(end.decode_s),
            )
        first = self._first_token
        return Timing(
            queue=_duration(admitted.queue_s) if admitted else None,
            first_token=None if first is None else _duration(first - self._submitted),
            decode=None if first is None else _duration(self._last_token - first),
        )


def _duration(seconds: float) -> Duration | None:
    """Return a duration, or None, which leaves the field unset, for a negative time: the engine did not measure that
    part.
    """
    if seconds < 0.0:
        return None
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def token_message(table: TokenBytes, token_id: int) -> Token:
    """Make a token without log-probabilities."""
    return Token(id=token_id, bytes=table.of(token_id))


def scored_token(
    table: TokenBytes, token_id: int, logprob: float, top_ids: Sequence[int], top_logprobs: Sequence[float]
) -> Token:
    """Make a token with its log-probability and the top tokens at its position, most likely first."""
    top = [
        TopToken(id=top_id, bytes=table.of(top_id), logprob=value)
        for top_id, value in zip(top_ids, top_logprobs, strict=True)
    ]
    return Token(id=token_id, bytes=table.of(token_id), logprob=logprob, top=top)


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
