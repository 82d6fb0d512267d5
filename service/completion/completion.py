"""A completion: turns the engine's tokens into the contract's events."""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from runahead.runtime.wire import messages
from runahead.service.completion.events import CompletionClock, reason_of, scored_token, usage
from runahead.service.contract.errors import ServiceError, given_up
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import CheckedRequest
from runahead.service.engine.request_stream import TokenBatch
from runahead.service.text.text import CompletionText, TextPiece, TokenBytes
from runahead.v1 import Delta, Finished, FinishReason, MatchedStop, Token

_TOKEN_BYTES: Final = 16  # bytes of a Token in a message without its `bytes` and log-probabilities
_CHARACTER_BYTES: Final = 4  # the most bytes of UTF-8


class _ReadyToken(msgspec.Struct, frozen=True):
    """A token to send, with the text that became certain with it. token_id: None for text alone. scored: the contract's
    token if it has log-probabilities. size: approximate bytes in a message.
    """

    token_id: int | None
    data: bytes
    scored: Token | None
    text: str
    size: int


class Completion:
    """Turns batches of tokens into deltas and finds the completion's end.

    A delta has all tokens available when it is made, up to the request's bound and `LIMITS.event_bytes`: a slow stream
    gets one delta for several launches, and a stream that keeps up gets one for each launch.

    submitted_at: see `RequestStream`.
    """

    def __init__(self, request: CheckedRequest, prompt_tokens: int, table: TokenBytes, submitted_at: float) -> None:
        self._request = request
        self._prompt_tokens = prompt_tokens
        self._table = table
        self._text = CompletionText(table, request.text.stop, request.text.include_stop)
        self._bound = request.text.max_tokens_per_message or LIMITS.max_tokens_per_message
        self._waiting: deque[tuple[int, messages.Logprobs | None]] = deque()  # may still be cut by a stop string
        self._ready: deque[_ReadyToken] = deque()
        self._ready_bytes = 0
        self._clock = CompletionClock(submitted_at)
        self.finished: Finished | None = None
        self._failure: ServiceError | None = None  # the error after the last delta, instead of `finished`

    @property
    def stopped_by_string(self) -> bool:
        """Whether a stop string ended the text, which the engine may not know yet."""
        return self._text.matched is not None

    def so_far(self, admitted: messages.Admitted | None) -> Finished:
        """Return how the completion ended; before its end, usage and times with a meaningless reason."""
        return self.finished or self._finish(None, admitted)

    @property
    def is_empty(self) -> bool:
        """Whether a delta would be empty."""
        return not self._ready

    @property
    def has_room(self) -> bool:
        """Whether the next delta has room for another token and the completion has not ended."""
        room = len(self._ready) < self._bound and self._ready_bytes < LIMITS.event_bytes
        return room and self.finished is None and self._failure is None

    def add(self, batch: TokenBatch) -> None:
        """Add the next tokens, and with the last of them `finished`, or an error if the engine gave the request up
        (`given_up`). Tokens before that are kept.
        """
        end = batch.finished
        if batch.token_ids:
            self._clock.note_tokens()
        silent = 1 if self._ends_silently(batch) else 0
        shown = len(batch.token_ids) - silent
        for token_id, logprobs in zip(batch.token_ids[:shown], batch.logprobs, strict=False):
            self._waiting.append((token_id, logprobs))
            self._keep(self._text.push(token_id))
            if self._text.matched is not None:
                break
        else:
            if end is not None:
                self._waiting.extend(zip(batch.token_ids[shown:], batch.logprobs[shown:], strict=True))
                self._keep(self._text.finish(silent))
        if end is not None and not self.stopped_by_string:
            self._failure = given_up(end.reason)
        if self._failure is None and (end is not None or self.stopped_by_string):
            self.finished = self._finish(end, batch.admitted)

    def fill(self, delta: Delta) -> bool:
        """Move ready tokens into an empty delta, up to its bounds. Returns False, or raises the failure, if none is
        ready.
        """
        texts, size = list[str](), 0
        while self._ready and len(delta.tokens) < self._bound:
            size += self._ready[0].size
            if size > LIMITS.event_bytes and texts:
                break
            ready = self._ready.popleft()
            self._ready_bytes -= ready.size
            texts.append(ready.text)
            if ready.scored is not None:
                delta.tokens.append(ready.scored)
            elif ready.token_id is not None:
                token = delta.tokens.add()  # filled in place, which takes half the time
                token.id = ready.token_id
                token.bytes = ready.data
        delta.text = "".join(texts)
        if not texts and self._failure is not None:
            raise self._failure
        return bool(texts)

    def _keep(self, piece: TextPiece) -> None:
        """Add a certain piece to the ready tokens; its text goes with its last token."""
        for left in range(piece.tokens, 0, -1):
            self._add_ready(*self._waiting.popleft(), piece.text if left == 1 else "")
        if piece.text and not piece.tokens:
            self._add_ready(None, None, piece.text)

    def _add_ready(self, token_id: int | None, logprobs: messages.Logprobs | None, text: str) -> None:
        data = b"" if token_id is None else self._table.of(token_id)
        size = _TOKEN_BYTES + len(data) + _CHARACTER_BYTES * len(text)
        scored = None
        if token_id is not None and logprobs is not None:
            scored = scored_token(self._table, token_id, logprobs.chosen, logprobs.top_ids, logprobs.top_logprobs)
            size += scored.ByteSize()
        self._ready.append(_ReadyToken(token_id, data, scored, text, size))
        self._ready_bytes += size

    def _ends_silently(self, batch: TokenBatch) -> bool:
        """Whether the last token ended the completion by its id and its text is not wanted."""
        end = batch.finished
        if end is None or end.stop_token_id < 0 or not batch.token_ids or self._request.text.include_stop:
            return False
        return batch.token_ids[-1] == end.stop_token_id and not self._text.is_stop(end.stop_token_id)

    # ------------------------------------------------------------ the end

    def _finish(self, end: messages.Finished | None, admitted: messages.Admitted | None) -> Finished:
        """Return the engine's figures, or those sent before if a stop string ended the completion first."""
        matched = self._text.matched
        reason, stop = FinishReason.FINISH_REASON_STOP, None
        if matched is not None:
            stop = MatchedStop(text=matched)
        elif end is not None:
            reason = reason_of(end, self._request.text.turn_ends)
            stop = MatchedStop(token_id=end.stop_token_id) if end.stop_token_id >= 0 else None
        return Finished(
            reason=reason,
            stop=stop,
            seed=self._request.sampling.seed,
            usage=usage(end, admitted, self._prompt_tokens, self._text.completion_tokens),
            timing=self._clock.timing(end, admitted),
        )
