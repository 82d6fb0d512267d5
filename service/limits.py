"""Every bound that requests, streams and messages are held to, in one frozen table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from runtime.request import MAX_BIAS, MAX_TOP_LOGPROBS


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that do not depend on the model. Those that do are the context length and the vocabulary's size.

    prompt_text_bytes: tokenizing takes about a second for each MiB.
    unread_bytes: what a slow reader may leave in the server, as `RequestStream` estimates it; the transport holds
    some more before that.
    """

    request_id_length: int = 128
    prompt_text_bytes: int = 1 << 20
    max_tokens: int = 1 << 20
    default_max_tokens: int = 256
    temperature_min: float = 1e-6  # below it, and above 0, float32 logits overflow
    temperature_max: float = 100.0
    top_logprobs: int = MAX_TOP_LOGPROBS
    stop_strings: int = 16
    stop_string_bytes: int = 256
    stop_token_ids: int = 16
    logit_bias_entries: int = MAX_BIAS
    logit_bias_value: float = 100.0
    max_tokens_per_message: int = 1024
    cache_salt_bytes: int = 128
    priority: int = 1000
    abort_ids: int = 1024
    detokenize_ids: int = 1 << 20
    message_bytes: int = 4 << 20
    unread_bytes: int = 256 << 10
    unknown_bytes: int = 4096  # fields that the server does not know, up to which each is named
    violations: int = 16  # field violations that one error reports
    retry_s: float = 1.0  # when to try again, in RetryInfo


LIMITS: Final = Limits()
