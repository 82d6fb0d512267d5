"""One completion: tokens from the engine in, events of the contract out."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator

from google.protobuf.duration_pb2 import Duration

from runahead.runtime.wire import messages
from runahead.runtime.wire.parameters import FinishReason as EngineReason
from runahead.service.errors import non_finite
from runahead.service.request_stream import GeneratedToken, TokenBatch
from runahead.service.text import CompletionText, TextPiece
from runahead.service.token_bytes import TokenBytes
from runahead.service.token_messages import scored_token, token_message
from runahead.service.validation import CheckedRequest
from runahead.v1 import Delta, Finished, FinishReason, MatchedStop, Timing, Token, Usage

_REASONS = {
    EngineReason.END_OF_SEQUENCE: FinishReason.FINISH_REASON_END_OF_SEQUENCE,
    EngineReason.STOP: FinishReason.FINISH_REASON_STOP,
    EngineReason.LENGTH: FinishReason.FINISH_REASON_LENGTH,
    EngineReason.CONTEXT_LENGTH: FinishReason.FINISH_REASON_CONTEXT_LENGTH,
    EngineReason.ABORTED: FinishReason.FINISH_REASON_ABORTED,
}


class Completion:
    """Turns batches of tokens into deltas, finds the end, and says how it ended.

    `finished` is set with the last delta that `deltas` yields, and not before.
    """

    def __init__(self, request: CheckedRequest, prompt_tokens: int, table: TokenBytes) -> None:
        self._request = request
        self._prompt_tokens = prompt_tokens
        self._table = table
        self._text = CompletionText(table, request.text.stop, request.text.include_stop)
        self._waiting: deque[GeneratedToken] = deque()  # not yet known to be kept
        self._submitted = time.monotonic()
        self._first_token: float | None = None
        self._last_token = self._submitted
        self.finished: Finished | None = None

    @property
    def stopped_by_string(self) -> bool:
        """A stop string ended the text: the engine may not know yet."""
        return self._text.matched is not None

    def deltas(self, batch: TokenBatch) -> Iterator[Delta]:
        """The batch as deltas of at most `max_tokens_per_message` tokens; nothing empty.

        Raises ServiceError (INTERNAL) where the logits were not finite.
        """
        self._clock(batch)
        text, tokens = "", list[Token]()
        bound = self._request.text.max_tokens_per_message or sys.maxsize
        for piece in self._pieces(batch):
            text += piece.text
            for _ in range(piece.tokens):
                if len(tokens) == bound:
                    yield Delta(tokens=tokens)
                    tokens = []
                tokens.append(self._token(self._waiting.popleft()))
            if len(tokens) == bound:
                yield Delta(text=text, tokens=tokens)
                text, tokens = "", []
        if text or tokens:
            yield Delta(text=text, tokens=tokens)
        if self.stopped_by_string or batch.finished is not None:
            self.finished = self._finish(batch.finished, batch.admitted)

    def _pieces(self, batch: TokenBatch) -> Iterator[TextPiece]:
        """What each token makes certain; at the end, what had waited."""
        end = batch.finished
        if end is not None and end.reason == EngineReason.NON_FINITE:
            raise non_finite()
        silent = 1 if self._ends_silently(batch) else 0
        shown = len(batch.tokens) - silent
        for generated in batch.tokens[:shown]:
            self._waiting.append(generated)
            yield self._text.push(generated.token_id)
            if self.stopped_by_string:
                return
        if end is not None:
            self._waiting.extend(batch.tokens[shown:])
            yield self._text.finish(silent)

    def _ends_silently(self, batch: TokenBatch) -> bool:
        """The last token is the one that ended the completion, and its text is not wanted."""
        end = batch.finished
        if end is None or end.stop_token_id < 0 or not batch.tokens or self._request.text.include_stop:
            return False
        return batch.tokens[-1].token_id == end.stop_token_id

    def _token(self, generated: GeneratedToken) -> Token:
        token_id, logprobs = generated.token_id, generated.logprobs
        if logprobs is None:
            return token_message(self._table, token_id)
        return scored_token(self._table, token_id, logprobs.chosen, logprobs.top_ids, logprobs.top_logprobs)

    # ------------------------------------------------------------ the end

    def _finish(self, end: messages.Finished | None, admitted: messages.Admitted | None) -> Finished:
        """The engine's figures; where a stop string ended the completion before the engine did, those it had sent."""
        told = end or admitted
        matched = self._text.matched
        reason, stop = FinishReason.FINISH_REASON_STOP, None
        if matched is not None:
            stop = MatchedStop(text=matched)
        elif end is not None:
            reason = _REASONS[EngineReason(end.reason)]
            stop = MatchedStop(token_id=end.stop_token_id) if end.stop_token_id >= 0 else None
        return Finished(
            reason=reason,
            stop=stop,
            seed=self._request.sampling.seed,
            usage=Usage(
                prompt_tokens=self._prompt_tokens,
                cached_tokens=told.cached_tokens if told else 0,
                completion_tokens=self._text.completion_tokens,
            ),
            timing=self._timing(end, admitted),
        )

    def _timing(self, end: messages.Finished | None, admitted: messages.Admitted | None) -> Timing:
        """The engine's clock where it sent its times; otherwise what was seen here."""
        if end is not None:
            return Timing(
                queue=_duration(end.queue_s),
                prefill=_duration(end.prefill_s),
                first_token=_duration(end.first_token_s),
                decode=_duration(end.decode_s),
            )
        first = self._last_token if self._first_token is None else self._first_token
        return Timing(
            queue=_duration(admitted.queue_s) if admitted else None,
            first_token=_duration(first - self._submitted),
            decode=_duration(self._last_token - first),
        )

    def _clock(self, batch: TokenBatch) -> None:
        if batch.tokens:
            self._last_token = time.monotonic()
            if self._first_token is None:
                self._first_token = self._last_token


def _duration(seconds: float) -> Duration | None:
    """None, which leaves a field unset, for a negative time: the engine did not see that part."""
    if seconds < 0.0:
        return None
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
