"""Mixtral and Qwen3 with experts: decoders with experts in every layer or in a pattern of layers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.architecture import Architecture, TensorReader
from runahead.runtime.models.blocks.dense import (
    attention,
    dense_weights,
    feed_forward,
    one_window,
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
)
from runahead.runtime.models.config.keys import BIASES_AS_THEY_ARE, unread
from runahead.runtime.models.config.rope_values import rope
from runahead.runtime.models.config.values import flag, number

_MIXTRAL, _QWEN3 = "MixtralForCausalLM", "Qwen3MoeForCausalLM"
# of Qwen3's authors; of transformers 5 and Mixtral
_EXPERTS: Final = "num_experts", "num_local_experts"
_DENSE: Final = "mlp_only_layers"
_STEP: Final = "decoder_sparse_step"


def _switched_window(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Return windows for every layer if they are switched on."""
    given = raw.get("sliding_window", 4096)
    return (window_size(given) if window_switch(raw) else 0,) * layers


def _read_mixtral(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> ExpertsConfig:
    return read_dense(
        ExpertsConfig, raw, eos_token_ids, architecture=_MIXTRAL, kv_heads=8, positions=131072, windows=one_window,
        eps=1e-5, rope=partial(rope, theta=1e6), **read_choice(raw, _EXPERTS[1:], experts=8, chosen=2),
        expert_size=number(raw, "intermediate_size", int), renormalised=True,
        sparse=(True,) * number(raw, "num_hidden_layers", int),
    )  # fmt: skip


def _read_qwen3(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> ExpertsConfig:
    return read_dense(
        ExpertsConfig, raw, eos_token_ids, architecture=_QWEN3, kv_heads=4, positions=32768, windows=_switched_window,
        flags=("attention_bias",), **read_choice(raw, _EXPERTS, experts=128, chosen=8),
        expert_size=number(raw, "moe_intermediate_size", int, 768), renormalised=flag(raw, "norm_topk_prob"),
        sparse=read_sparse(raw, _DENSE, _STEP),
    )  # fmt: skip


def _layer(
    config: ExpertsConfig,
    number: int,
    tensors: TensorReader,
    *,
    block: str,
    projections: tuple[str, str, str],
    head_norms: bool = False,
) -> Layer:
    """Build a layer. block, projections: see `experts`. head_norms: see `attention`."""
    mixer = attention(config, number, tensors, head_norms=head_norms)
    if not config.sparse[number]:
        return Layer(mixer, feed_forward(config, number, tensors))
    return Layer(mixer, experts(config, number, tensors, block=block, projections=projections))


MIXTRAL: Final = Architecture(
    name=_MIXTRAL,
    model_type="mixtral",
    models="Mixtral 8x7B and 8x22B",
    layers=("attention", "window", "experts"),
    understood=READ_BY_EXPERTS.union(_EXPERTS[1:]) - {"use_sliding_window"},
    unread=(ROUTERS_IN_TRAINING, unread(BIASES_AS_THEY_ARE, "attention_bias mlp_bias")),
    read=_read_mixtral,
    weights=partial(
        dense_weights, layer=partial(_layer, block="block_sparse_moe", projections=("w1", "w3", "w2"))
    ),
)  # fmt: skip
QWEN3_MOE: Final = Architecture(
    name=_QWEN3,
    model_type="qwen3_moe",
    models="Qwen3 with experts: 30B-A3B, 235B-A22B, Coder 30B-A3B",
    layers=("attention", "window", "dense", "experts"),
    understood=READ_BY_EXPERTS.union(
        _EXPERTS, {_DENSE, _STEP, "moe_intermediate_size", "norm_topk_prob", "attention_bias"}
    ),
    unread=(
        ROUTERS_IN_TRAINING,
        unread(BIASES_AS_THEY_ARE, "mlp_bias"),
        unread("From which layer on a window holds: where it is switched on, it holds on all.", "max_window_layers"),
    ),
    read=_read_qwen3,
    weights=partial(
        dense_weights,
        layer=partial(_layer, block="mlp", projections=("gate_proj", "up_proj", "down_proj"), head_norms=True),
    ),
)
