"""Granite 3: a Llama whose embedding, residual sums, scores and logits are each multiplied by a number.

The residual is kept divided by `residual_multiplier`: what the layers add to it then needs no factor, the embedding is
multiplied by that much more, and a norm, which looks at proportions, sees the same where its epsilon is divided by the
square. The logits' divisor is in the weight of the final norm, which is float32 for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from runahead.runtime.kernels.layers import Layer, Norm
from runahead.runtime.models.architecture import Architecture, ModelWeights, TensorReader
from runahead.runtime.models.blocks.dense import (
    READ_BY_DENSE,
    DenseConfig,
    attention,
    dense_weights,
    feed_forward,
    no_windows,
    passed_over,
    read_dense,
    small,
)
from runahead.runtime.models.config.values import flag, number

_NAME: Final = "GraniteForCausalLM"
_BIASES: Final = ("attention_bias", "mlp_bias")
_MULTIPLIERS: Final = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(DenseConfig):
    """attention_bias: of queries, keys, values and the attention's output. mlp_bias: of the feed-forward.

    embedding_multiplier: of a token's row of the embedding. residual_multiplier: of what a mixer or a feed-forward adds
    to the residual. attention_multiplier: of the scores, in place of 1 / sqrt(head_dim). logits_scaling: divides the
    logits.
    """

    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> GraniteConfig:
    own: dict[str, Any] = {key: flag(raw, key) for key in _BIASES}
    own |= {key: number(raw, key, float, 1.0) for key in _MULTIPLIERS}
    return read_dense(
        GraniteConfig, raw, eos_token_ids, architecture=_NAME, kv_heads=None, positions=2048, windows=no_windows, **own
    )


def _layer(config: GraniteConfig, number: int, tensors: TensorReader) -> Layer:
    bias = config.attention_bias
    scale = config.attention_multiplier
    mixer = attention(config, number, tensors, qkv_bias=bias, output_bias=bias, scale=scale)
    return Layer(mixer, feed_forward(config, number, tensors, bias=config.mlp_bias))


def _weights(config: GraniteConfig, tensors: TensorReader) -> ModelWeights:
    share = config.residual_multiplier
    config = replace(config, rms_norm_eps=config.rms_norm_eps / share**2)
    weights = dense_weights(config, tensors, _layer, embedding_scale=config.embedding_multiplier / share)
    last = weights.final_norm
    return replace(weights, final_norm=Norm(last.weight.float() / config.logits_scaling, last.eps))


GRANITE: Final = Architecture(
    name=_NAME,
    model_type="granite",
    models="Granite 3 without experts",
    understood=READ_BY_DENSE.union(_BIASES, _MULTIPLIERS),
    unread=(),
    read=_read,
    weights=_weights,
    passed_over=passed_over,
    small=small,
)
