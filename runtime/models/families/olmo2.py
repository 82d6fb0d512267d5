"""OLMo 2: norms behind attention and feed-forward, none before them. Queries and keys are normalised over all heads
of a token together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from runahead.runtime.kernels.layers import Layer
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
from runahead.runtime.models.config.values import flag

_NAME: Final = "Olmo2ForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo2Config(DenseConfig):
    """attention_bias: of queries, keys, values and the attention's output."""

    attention_bias: bool = False


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> Olmo2Config:
    return read_dense(
        Olmo2Config, raw, eos_token_ids, architecture=_NAME, kv_heads=None, positions=2048, windows=no_windows,
        eps=1e-5, attention_bias=flag(raw, "attention_bias"),
    )  # fmt: skip


def _layer(config: Olmo2Config, number: int, tensors: TensorReader) -> Layer:
    bias = config.attention_bias
    mixer = attention(
        config, number, tensors, qkv_bias=bias, output_bias=bias, head_norms=True, norms_span_heads=True, norm=None,
        post_norm="post_attention_layernorm",
    )  # fmt: skip
    return Layer(mixer, feed_forward(config, number, tensors, norm=None, post_norm="post_feedforward_layernorm"))


def _weights(config: Olmo2Config, tensors: TensorReader) -> ModelWeights:
    return dense_weights(config, tensors, _layer)


OLMO2: Final = Architecture(
    name=_NAME,
    model_type="olmo2",
    models="OLMo 2",
    understood=READ_BY_DENSE | {"attention_bias"},
    unread=(),
    read=_read,
    weights=_weights,
    passed_over=passed_over,
    small=small,
)
