"""Qwen2 and 2.5: queries, keys and values have biases, and a window may be switched on."""

from __future__ import annotations

from collections.abc import Mapping
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

_NAME: Final = "Qwen2ForCausalLM"


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> DenseConfig:
    return read_dense(
        DenseConfig, raw, eos_token_ids, architecture=_NAME, kv_heads=32, positions=32768, windows=switched_windows
    )


def _layer(config: DenseConfig, number: int, tensors: TensorReader) -> Layer:
    return Layer(attention(config, number, tensors, qkv_bias=True), feed_forward(config, number, tensors))


def _weights(config: DenseConfig, tensors: TensorReader) -> ModelWeights:
    return dense_weights(config, tensors, _layer)


QWEN2: Final = Architecture(
    name=_NAME,
    model_type="qwen2",
    models="Qwen2, Qwen2.5 and DeepSeek's distillations",
    layers=("attention", "window", "dense"),
    understood=READ_BY_DENSE | {"max_window_layers"},
    unread=(unread(BIASES_AS_THEY_ARE, "attention_bias mlp_bias"),),
    read=_read,
    weights=_weights,
    passed_over=passed_over,
    small=small,
)
