"""Computes expensive parts of a request in the front end, before the engine's loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.token_mask import token_mask
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.block_keys import prompt_keys
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams


def prepared_submit(
    handle: int,
    request_id: str,
    prompt: NDArray[np.int32],
    sampling: SamplingParams,
    stopping: StoppingParams,
    *,
    block_size: int,
    cache_salt: str = "",
    **others: Any,
) -> m.Submit:
    """Make the message for a completion of `prompt`, int32 [n].

    block_size: of the engine's KV blocks if it has a prefix cache, else 0. others: further fields of `Submit`.
    """
    tokens = np.ascontiguousarray(prompt, np.dtype("<i4"))
    return m.Submit(
        handle,
        request_id,
        tokens.tobytes(),
        sampling,
        stopping,
        cache_salt=cache_salt,
        prompt_ids=_distinct(tokens).tobytes() if sampling.repetition_penalty != 1 else b"",
        block_keys=prompt_keys(cache_salt, tokens, block_size) if block_size else b"",
        **others,
    )


def allowed_mask(token_ids: NDArray[np.int64], vocab_size: int) -> bytes:
    """Make `SamplingParams.allowed_mask` for these ids, [n], each below `vocab_size`."""
    return token_mask(token_ids, vocab_size).tobytes()


def _distinct(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return each id once, ascending."""
    ordered = np.sort(tokens)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if ordered.size else ordered
