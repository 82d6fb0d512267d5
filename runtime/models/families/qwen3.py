"""Qwen3: every head of queries and keys is normalised, and a window may be switched on."""

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
    passed_over,
    read_dense,
    small,
    switched_windows,
)
from runahead.runtime.models.config.keys import BIASES_AS_THEY_ARE, unread
from runahead.runtime.models.config.values import flag

_NAME: Final = "Qwen3ForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(DenseConfig):
    """attention_bias: of queries, keys, values and the attention's output."""

    attention_bias: bool = False


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> Qwen3Config:
    return read_dense(
        Qwen3Config, raw, eos_token_ids, architecture=_NAME, kv_heads=32, positions=32768, windows=switched_windows,
        head_dim=128, attention_bias=flag(raw, "attention_bias"),
    )  # fmt: skip


def _layer(config: Qwen3Config, number: int, tensors: TensorReader) -> Layer:
    bias = config.attention_bias
    mixer = attention(config, number, tensors, qkv_bias=bias, output_bias=bias, head_norms=True)
    return Layer(mixer, feed_forward(config, number, tensors))


def _weights(config: Qwen3Config, tensors: TensorReader) -> ModelWeights:
    return dense_weights(config, tensors, _layer)


QWEN3: Final = Architecture(
    name=_NAME,
    model_type="qwen3",
    models="Qwen3 without experts",
    layers=("attention", "window", "dense"),
    understood=READ_BY_DENSE | {"max_window_layers", "attention_bias"},
    unread=(unread(BIASES_AS_THEY_ARE, "mlp_bias"),),
    read=_read,
    weights=_weights,
    passed_over=passed_over,
    small=small,
)
