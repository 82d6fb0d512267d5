"""One completion: tokens from the engine in, events of the contract out."""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from runahead.runtime.wire import messages
from runahead.service.completion.completion_end import CompletionClock, reason_of, usage
from runahead.service.completion.token_messages import scored_token
from runahead.service.contract.errors import ServiceError, given_up
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import CheckedRequest
from runahead.service.engine.request_stream import TokenBatch
from runahead.service.text.text import CompletionText, TextPiece
from runahead.service.text.token_bytes import TokenBytes
from runahead.v1 import Delta, Finished, FinishReason, MatchedStop, Token

_TOKEN_BYTES: Final = 16  # of a Token in a message, without its `bytes` and log-probabilities
_CHARACTER_BYTES: Final = 4  # of UTF-8, at most


class _ReadyToken(msgspec.Struct, frozen=True):
    """A token that is kept, and the text that became certain with it. token_id: None for text alone. scored: the token
    as the contract has it, where it has log-probabilities. size: bytes that all this takes in a message, about."""

    token_id: int | None
    data: bytes
    scored: Token | None
    text: str
    size: int


class Completion:
    """Turns batches of tokens into deltas, finds the end, and says how it ended.

    A delta has all tokens that are there when it is made, up to the request's bound and `LIMITS.event_bytes`. So one
    delta makes up for all launches since the last, and a stream that keeps up gets one a launch.

    submitted_at: of its `RequestStream`.
    """

    def __init__(self, request: CheckedRequest, prompt_tokens: int, table: TokenBytes, submitted_at: float) -> None:
        self._request = request
        self._prompt_tokens = prompt_tokens
        self._table = table
        self._text = CompletionText(table, request.text.stop, request.text.include_stop)
        self._bound = request.text.max_tokens_per_message or LIMITS.max_tokens_per_message
        self._waiting: deque[tuple[int, messages.Logprobs | None]] = deque()  # not yet known to be kept
        self._ready: deque[_ReadyToken] = deque()
        self._ready_bytes = 0
        self._clock = CompletionClock(submitted_at)
        self.finished: Finished | None = None
        self._failure: ServiceError | None = None  # how it ends behind the last delta, in the place of `finished`

    @property
    def stopped_by_string(self) -> bool:
        """A stop string ended the text: the engine may not know yet."""
        return self._text.matched is not None

    def so_far(self, admitted: messages.Admitted | None) -> Finished:
        """How it ended; before that, what it has used and when, and a reason that means nothing."""
        return self.finished or self._finish(None, admitted)

    @property
    def is_empty(self) -> bool:
        """There is nothing to fill a delta with."""
        return not self._ready

    @property
    def has_room(self) -> bool:
        """The next delta has room for another token, and there may be one: it has not ended."""
        room = len(self._ready) < self._bound and self._ready_bytes < LIMITS.event_bytes
        return room and self.finished is None and self._failure is None

    def add(self, batch: TokenBatch) -> None:
        """The next tokens, and with the last of them `finished`, or a failure where the engine gave the request up: see
        `given_up`. What it said before is kept."""
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
        """Moves into an empty delta what is ready, as much as one may carry. If nothing is: False, or a failure."""
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
        """What has become certain is ready; the text goes with the last of its tokens."""
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
        """The last token ended the completion by its id, not as a stop string, and its text is not wanted."""
        end = batch.finished
        if end is None or end.stop_token_id < 0 or not batch.token_ids or self._request.text.include_stop:
            return False
        return batch.token_ids[-1] == end.stop_token_id and not self._text.is_stop(end.stop_token_id)

    # ------------------------------------------------------------ the end

    def _finish(self, end: messages.Finished | None, admitted: messages.Admitted | None) -> Finished:
        """The engine's figures; where a stop string ended the completion before the engine did, those it had sent."""
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
