"""Ministral: Mistral, with windows on the layers that `config.json` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.architecture import Architecture, ModelWeights, TensorReader
from runahead.runtime.models.config_keys import BIASES_AS_THEY_ARE, unread
from runahead.runtime.models.dense_decoder import (
    READ_BY_DENSE,
    DenseConfig,
    attention,
    dense_weights,
    feed_forward,
    numbered_windows,
    passed_over,
    read_dense,
    small,
)

_NAME: Final = "MinistralForCausalLM"


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    return numbered_windows(raw, _NAME, layers)


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> DenseConfig:
    return read_dense(
        DenseConfig, raw, eos_token_ids, architecture=_NAME, kv_heads=8, positions=131072, windows=_windows
    )


def _layer(config: DenseConfig, number: int, tensors: TensorReader) -> Layer:
    return Layer(attention(config, number, tensors), feed_forward(config, number, tensors))


def _weights(config: DenseConfig, tensors: TensorReader) -> ModelWeights:
    return dense_weights(config, tensors, _layer)


MINISTRAL: Final = Architecture(
    name=_NAME,
    model_type="ministral",
    models="Ministral 8B, where its layers are named",
    layers=("attention", "window", "dense"),
    understood=READ_BY_DENSE,
    unread=(unread(BIASES_AS_THEY_ARE, "attention_bias mlp_bias"),),
    read=_read,
    weights=_weights,
    passed_over=passed_over,
    small=small,
)
