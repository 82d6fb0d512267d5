"""Where a launch leaves the log-probabilities of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.plan import Chunk, LaunchPlan
from runahead.runtime.scheduler.outcomes import PromptPart
from runahead.runtime.scheduler.request import Request


def prompt_parts(
    plan: LaunchPlan, asked: Sequence[tuple[Request, Chunk]], epochs: NDArray[np.int64]
) -> tuple[PromptPart, ...]:
    """asked: chunks of the plan whose requests want them. epochs: [max_rows] of rows by slot."""
    if not asked:
        return ()
    tokens = np.full(plan.rows.size, 1 + plan.drafts)
    for chunk in plan.chunks:
        tokens[np.searchsorted(plan.rows, chunk.slot)] = chunk.tokens.size
    begins = np.cumsum(tokens) - tokens
    return tuple(
        PromptPart(
            request,
            int(epochs[chunk.slot]),
            chunk.slot,
            chunk.start,
            int(begins[np.searchsorted(plan.rows, chunk.slot)]),
            chunk.tokens.size - chunk.samples,
        )
        for request, chunk in asked
    )
