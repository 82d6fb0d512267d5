"""Mistral: no biases, and a window on every layer unless `config.json` says otherwise.

Where the file names the layers that have a window, it is saved as Ministral.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.architecture import Architecture, ModelWeights, TensorReader
from runahead.runtime.models.blocks.dense import (
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
from runahead.runtime.models.config.keys import BIASES_AS_THEY_ARE, unread


def _layer(config: DenseConfig, number: int, tensors: TensorReader) -> Layer:
    return Layer(attention(config, number, tensors), feed_forward(config, number, tensors))


def _weights(config: DenseConfig, tensors: TensorReader) -> ModelWeights:
    return dense_weights(config, tensors, _layer)


def _architecture(name: str, model_type: str, models: str) -> Architecture[DenseConfig]:
    def read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> DenseConfig:
        return read_dense(
            DenseConfig, raw, eos_token_ids, architecture=name, kv_heads=8, positions=131072, windows=numbered_windows
        )

    return Architecture(
        name=name,
        model_type=model_type,
        models=models,
        layers=("attention", "window", "dense"),
        understood=READ_BY_DENSE,
        unread=(unread(BIASES_AS_THEY_ARE, "attention_bias mlp_bias"),),
        read=read,
        weights=_weights,
        passed_over=passed_over,
        small=small,
    )


MISTRAL = _architecture("MistralForCausalLM", "mistral", "Mistral 7B, Mistral Nemo, and others of its shape")
MINISTRAL = _architecture("MinistralForCausalLM", "ministral", "Ministral 8B, where its layers are named")
