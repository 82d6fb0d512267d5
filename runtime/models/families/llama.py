"""Llama 1 to 3: biases where `config.json` says so, and no windows."""

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
from runahead.runtime.models.config.keys import unread
from runahead.runtime.models.config.values import flag

_NAME: Final = "LlamaForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DenseConfig):
    """attention_bias: of queries, keys, values and the attention's output. mlp_bias: of the feed-forward."""

    attention_bias: bool = False
    mlp_bias: bool = False


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> LlamaConfig:
    biases: dict[str, Any] = {key: flag(raw, key) for key in ("attention_bias", "mlp_bias")}
    return read_dense(
        LlamaConfig, raw, eos_token_ids, architecture=_NAME, kv_heads=None, positions=2048, windows=no_windows, **biases
    )  # fmt: skip


def _layer(config: LlamaConfig, number: int, tensors: TensorReader) -> Layer:
    bias = config.attention_bias
    mixer = attention(config, number, tensors, qkv_bias=bias, output_bias=bias)
    return Layer(mixer, feed_forward(config, number, tensors, bias=config.mlp_bias))


def _weights(config: LlamaConfig, tensors: TensorReader) -> ModelWeights:
    return dense_weights(config, tensors, _layer)


LLAMA: Final = Architecture(
    name=_NAME,
    model_type="llama",
    models="Llama 1 to 3.3, SmolLM2, TinyLlama, Falcon 3, DeepSeek's distillations, and others of its shape",
    understood=READ_BY_DENSE | {"attention_bias", "mlp_bias"},
    unread=(unread("From which layer on a window holds: every layer attends to all tokens.", "max_window_layers"),),
    read=_read,
    weights=_weights,
    passed_over=passed_over,
    small=small,
)
