"""Every bound that requests, streams and messages are held to, in one frozen table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from runahead.runtime.wire.parameters import MAX_ABORT_IDS, MAX_BIAS, MAX_COMPLETIONS, MAX_TOP_LOGPROBS


def _float32(value: float) -> float:
    """As the contract carries it: a client that sends the bound itself must not miss it by a rounding."""
    return float(np.float32(value))


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that do not depend on the model. Those that do are the context length and the vocabulary's size.

    prompt_text_bytes: tokenizing takes about a second for each MiB, in many turns where the text can be cut.
    unread_bytes: what a slow reader may leave in the server, as `RequestStream` estimates it; the transport holds
    some more before that.
    unread_prompt_bytes: the same for log-probabilities of the prompt, as the engine sends them. It is larger, since an
    engine may compute a prompt faster than the front end can turn it into messages.
    unsent_bytes: what the engine has not read yet of all that it was sent, beyond which it gets no request.
    stats_watchers: calls of WatchStats open at once, of a process.
    kv_subscribers: calls of SubscribeKvEvents open at once, of a process.
    work_bytes: what a call of Tokenize or Detokenize counts at least, so that many short ones are work too.
    event_bytes: where a delta, or a `prompt` event, is cut: what a stream whose reader stalls leaves in the library.
    structure_bytes: of a schema, an expression or a grammar, and of all texts of a choice together.
    structure_depth: lists and objects, or brackets, inside each other. structure_cache_bytes: of grammars, and of
    reasons why there is none, that a front end remembers.
    once_prompt_bytes: bytes of an answer of GenerateOnce that the prompt's tokens may take. A client receives 4 MiB
    unless it is set otherwise; the rest is for the completion.
    """

    request_id_length: int = 128
    prompt_text_bytes: int = 1 << 20
    max_tokens: int = 1 << 20
    default_max_tokens: int = 256
    temperature_min: float = _float32(1e-6)  # below it, and above 0, float32 logits overflow
    temperature_max: float = 100.0
    repetition_penalty_min: float = _float32(0.01)
    repetition_penalty_max: float = 100.0
    additive_penalty: float = 2.0  # presence and frequency, either sign
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
    unknown_bytes: int = 4096  # fields that the server does not know, up to which each is named
    # Field violations that one error reports, and of one list: the error must fit into the 8 KiB of metadata that
    # clients take.
    violations: int = 40
    list_violations: int = 3
    retry_s: float = 1.0  # when to try again, in RetryInfo, as long as nothing is known of how fast room is made
    retry_least_s: float = 0.1
    retry_most_s: float = 60.0


LIMITS: Final = Limits()
