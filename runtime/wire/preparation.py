"""Computes expensive parts of a request in the front end, before the engine's loop."""

from __future__ import annotations

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
    priority: int = 0,
    cache_salt: str = "",
    submitted_at: float | None = None,
    announced: bool = False,
    structure: str = "",
    caller: str = "",
    outranks: bool = True,
    n: int = 1,
) -> m.Submit:
    """Make the message for a completion of `prompt`, int32 [n].

    block_size: of the engine's KV blocks if it has a prefix cache, else 0. submitted_at, announced, structure, caller,
    outranks, n: see `Submit`.
    """
    tokens = np.ascontiguousarray(prompt, np.dtype("<i4"))
    repeats = sampling.repetition_penalty != 1
    return m.Submit(
        handle=handle,
        request_id=request_id,
        prompt=tokens.tobytes(),
        sampling=sampling,
        stopping=stopping,
        priority=priority,
        cache_salt=cache_salt,
        prompt_ids=_distinct(tokens).tobytes() if repeats else b"",
        block_keys=prompt_keys(cache_salt, tokens, block_size) if block_size else b"",
        submitted_at=submitted_at,
        announced=announced,
        structure=structure,
        caller=caller,
        outranks=outranks,
        n=n,
    )


def allowed_mask(token_ids: NDArray[np.int64], vocab_size: int) -> bytes:
    """Make `SamplingParams.allowed_mask` for these ids, [n], each below `vocab_size`."""
    return token_mask(token_ids, vocab_size).tobytes()


def _distinct(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return each id once, ascending."""
    ordered = np.sort(tokens)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if ordered.size else ordered
