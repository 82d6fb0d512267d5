"""Bounds of requests, streams and messages in one frozen table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from runahead.runtime.wire.parameters import MAX_ABORT_IDS, MAX_BIAS, MAX_COMPLETIONS, MAX_TOP_LOGPROBS


def _float32(value: float) -> float:
    """Round to float32 like the contract's field, so that a client can send the bound itself."""
    return float(np.float32(value))


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that do not depend on the model; context length and vocabulary do.

    prompt_text_bytes: tokenizing takes about a second for each MiB, in many turns if the text can be cut.
    unread_bytes: unread events of a slow client, as `RequestStream` estimates them; the transport buffers more.
    unread_prompt_bytes: the same for the prompt's log-probabilities; larger, since an engine may be faster than the
        front end.
    unsent_bytes: data that the engine has not read, beyond which it gets no request.
    stats_watchers: open WatchStats calls of a process.
    kv_subscribers: open SubscribeKvEvents calls of a process.
    work_bytes: the least that Tokenize or Detokenize counts.
    event_bytes: the size of a delta or `prompt` event, which a stalled stream leaves in the library.
    structure_bytes: of a schema, an expression, a grammar, or all texts of a choice.
    structure_depth: nesting of lists, objects or brackets. structure_cache_bytes: grammars and errors that a front end
        caches.
    once_prompt_bytes: prompt tokens in a GenerateOnce answer; a client receives 4 MiB by default, and the rest is for
        the completion.
    """

    request_id_length: int = 128
    prompt_text_bytes: int = 1 << 20
    max_tokens: int = 1 << 20
    default_max_tokens: int = 256
    temperature_min: float = _float32(1e-6)  # above 0 and below this, float32 logits overflow
    temperature_max: float = 100.0
    repetition_penalty_min: float = _float32(0.01)
    repetition_penalty_max: float = 100.0
    additive_penalty: float = 2.0  # presence and frequency, of either sign
    top_logprobs: int = MAX_TOP_LOGPROBS
    stop_strings: int = 16
    stop_string_bytes: int = 256
    stop_token_ids: int = 16
    logit_bias_entries: int = MAX_BIAS
    logit_bias_value: float = 100.0
    max_tokens_per_message: int = 1024
    cache_salt_bytes: int = 128
    priority: int = 1000
    abort_ids: int = MAX_ABORT_IDS
    detokenize_ids: int = 1 << 20
    unread_bytes: int = 256 << 10
    unread_prompt_bytes: int = 4 << 20
    unsent_bytes: int = 32 << 20
    work_bytes: int = 1 << 10
    event_bytes: int = 64 << 10
    once_prompt_bytes: int = 3 << 20
    structure_bytes: int = 1 << 17
    structure_depth: int = 64
    structure_cache_bytes: int = 16 << 20
    completions: int = MAX_COMPLETIONS
    choices: int = 1024
    choice_bytes: int = 1024
    chat_messages: int = 1024
    stats_watchers: int = 32
    kv_subscribers: int = 16
    unknown_bytes: int = 4096  # of unknown fields, up to which each is named
    # Field violations in one error, at least one for each field of a request, and of one list: the error must fit the 8
    # KiB of metadata that clients accept.
    violations: int = 40
    list_violations: int = 3
    retry_s: float = 1.0  # RetryInfo's delay while the pace is unknown
    retry_least_s: float = 0.1
    retry_most_s: float = 60.0


LIMITS: Final = Limits()
