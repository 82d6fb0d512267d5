"""Qwen3 with experts: a Qwen3 in which layers of a named pattern have experts, and the others one feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.architecture import Architecture, ModelWeights, TensorReader
from runahead.runtime.models.blocks.dense import (
    attention,
    dense_weights,
    feed_forward,
    passed_over,
    read_dense,
    window_size,
    window_switch,
)
from runahead.runtime.models.blocks.experts import (
    READ_BY_EXPERTS,
    ROUTERS_IN_TRAINING,
    ExpertsConfig,
    experts,
    read_choice,
    read_sparse,
    small_with_experts,
)
from runahead.runtime.models.config.keys import BIASES_AS_THEY_ARE, unread
from runahead.runtime.models.config.values import flag, number

_NAME: Final = "Qwen3MoeForCausalLM"
_EXPERTS: Final = "num_experts", "num_local_experts"  # as the model's makers wrote it, and as transformers 5 does
_DENSE: Final = "mlp_only_layers"
_STEP: Final = "decoder_sparse_step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(ExpertsConfig):
    """attention_bias: of queries, keys, values and the attention's output."""

    attention_bias: bool = False


def _windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Switched on, a window holds on every layer."""
    given = raw.get("sliding_window", 4096)
    return (window_size(given) if window_switch(raw) else 0,) * layers


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> Qwen3MoeConfig:
    own: dict[str, Any] = {
        **read_choice(raw, _EXPERTS, experts=128, chosen=8),
        "expert_size": number(raw, "moe_intermediate_size", int, 768),
        "renormalised": flag(raw, "norm_topk_prob"),
        "sparse": read_sparse(raw, _DENSE, _STEP),
        "attention_bias": flag(raw, "attention_bias"),
    }
    return read_dense(
        Qwen3MoeConfig, raw, eos_token_ids, architecture=_NAME, kv_heads=4, positions=32768, windows=_windows, **own
    )


def _layer(config: Qwen3MoeConfig, number: int, tensors: TensorReader) -> Layer:
    bias = config.attention_bias
    mixer = attention(config, number, tensors, qkv_bias=bias, output_bias=bias, head_norms=True)
    if not config.sparse[number]:
        return Layer(mixer, feed_forward(config, number, tensors))
    names = ("gate_proj", "up_proj", "down_proj")
    return Layer(mixer, experts(config, number, tensors, block="mlp", projections=names))


def _weights(config: Qwen3MoeConfig, tensors: TensorReader) -> ModelWeights:
    return dense_weights(config, tensors, _layer)


QWEN3_MOE: Final = Architecture(
    name=_NAME,
    model_type="qwen3_moe",
    models="Qwen3 with experts: 30B-A3B, 235B-A22B, Coder 30B-A3B",
    layers=("attention", "window", "dense", "experts"),
    understood=READ_BY_EXPERTS.union(_EXPERTS, {_DENSE, _STEP}, {"moe_intermediate_size", "norm_topk_prob"})
    | {"attention_bias"},
    unread=(
        ROUTERS_IN_TRAINING,
        unread(BIASES_AS_THEY_ARE, "mlp_bias"),
        unread("From which layer on a window holds: where it is switched on, it holds on all.", "max_window_layers"),
    ),
    read=_read,
    weights=_weights,
    passed_over=passed_over,
    small=small_with_experts,
)
