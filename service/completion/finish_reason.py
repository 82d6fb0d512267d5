"""Why a completion ended, in the words of the contract."""

from __future__ import annotations

from collections.abc import Container

from runahead.runtime.wire import messages
from runahead.runtime.wire.parameters import FinishReason as EngineReason
from runahead.v1 import FinishReason

_REASONS = {
    EngineReason.END_OF_SEQUENCE: FinishReason.FINISH_REASON_END_OF_SEQUENCE,
    EngineReason.STOP: FinishReason.FINISH_REASON_STOP,
    EngineReason.LENGTH: FinishReason.FINISH_REASON_LENGTH,
    EngineReason.CONTEXT_LENGTH: FinishReason.FINISH_REASON_CONTEXT_LENGTH,
    EngineReason.ABORTED: FinishReason.FINISH_REASON_ABORTED,
}


def reason_of(end: messages.Finished, turn_ends: Container[int]) -> FinishReason:
    """turn_ends: stop tokens that end an answer to a chat, which are the model's own end of it."""
    if end.stop_token_id in turn_ends:
        return FinishReason.FINISH_REASON_END_OF_SEQUENCE
    return _REASONS[EngineReason(end.reason)]
