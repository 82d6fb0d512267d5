"""Penalties on tokens that a row already has: the definition that the CUDA kernels follow bit by bit.

On a row's raw logits x, before bias and masks, each step rounded to float32, without fused multiply-add:

1. Repetition r, for every token of the prompt or the completion: x / r if x is above 0, else x * r.
2. Frequency f, for every token of the completion: x - f * n, with n its occurrences in the completion.
3. Presence p, for the same tokens: x - p.

The completion is every token that S has kept of the row, including those before an eviction. Log-probabilities use the
raw logits. Repetition: Keskar et al., "CTRL", 2019, with the two cases of the sign as in transformers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.kernels.reference.sampling_filters import bits

F32 = NDArray[np.float32]


def penalize(
    logits: F32,
    counts: NDArray[np.int32],
    in_prompt: NDArray[np.int32],
    repetition: np.float32,
    presence: np.float32,
    frequency: np.float32,
) -> None:
    """Apply a row's penalties to its logits, [vocab], in place.

    counts: int32 [vocab] occurrences in the completion. in_prompt: int32 [ceil(vocab / 32)] a bit for each token of the
    prompt; read only if repetition, above 0, is not 1.
    """
    said = np.flatnonzero(counts)
    if repetition != 1.0:
        known = np.flatnonzero((counts > 0) | bits(in_prompt, logits.shape[0]))
        x = logits[known]
        logits[known] = np.where(x > 0.0, x / repetition, x * repetition)
    x = logits[said]
    x = x - frequency * counts[said].astype(np.float32)
    logits[said] = x - presence
