"""A model with one enormous logit after one beginning of a prompt: finite, or the only number that is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.architecture import ModelWeights
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.cpu_check.self_test import Trial
from runahead.runtime.models.decoder import Decoder

_LARGE = 3.0e38
_BEYOND_FLOAT32 = 4.0e38


def hidden_states(config: ModelConfig, weights: ModelWeights, tokens: Sequence[int]) -> torch.Tensor:
    """Final hidden states, [tokens, hidden], of a sequence: the logits of a head that hands them through."""
    kernels = ReferenceKernels()
    through = replace(weights, lm_head=kernels.pack_weight(torch.eye(config.hidden_size)))
    trial = Trial(Decoder(config, through, kernels), [tokens], len(tokens), 16, seed=0)
    return trial.advance([(0, len(tokens))])[0]


def overflowing(
    config: ModelConfig, weights: ModelWeights, tokens: Sequence[int], token: int, sign: int = 1
) -> ModelWeights:
    """`weights` whose logit of `token` is infinite, of this sign, after exactly these `tokens`.

    Its row of the head points along the hidden state there, and is so long that the product leaves float32 for nothing
    but that state: after anything else the logit is finite, though large.
    """
    return _with_logit(config, weights, tokens, token, sign * _BEYOND_FLOAT32)


def large(config: ModelConfig, weights: ModelWeights, tokens: Sequence[int], token: int) -> ModelWeights:
    """`weights` whose logit of `token` is near the largest float32 after these `tokens`, and finite always."""
    return _with_logit(config, weights, tokens, token, _LARGE)


def _with_logit(
    config: ModelConfig, weights: ModelWeights, tokens: Sequence[int], token: int, logit: float
) -> ModelWeights:
    target = hidden_states(config, weights, tokens)[-1]
    head = weights.lm_head.clone()
    head[token] = target * (logit / float(target.double().square().sum()))
    return replace(weights, lm_head=head)
