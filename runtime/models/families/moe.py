"""Decoders with experts: Mixtral and Qwen3, in every layer or in a pattern of layers, and GLM-4.5.

GLM-4.5 has partial rope, and first layers with a dense feed-forward; in the others experts are chosen by corrected
scores, beside a shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.architecture import Architecture, TensorReader
from runahead.runtime.models.blocks.dense import (
    READ_BY_DENSE,
    DenseConfig,
    all_tokens,
    attention,
    dense_weights,
    feed_forward,
    one_window,
    read_dense,
    window_size,
    window_switch,
)
from runahead.runtime.models.blocks.experts import (
    READ_BY_CORRECTED,
    READ_BY_EXPERTS,
    ROUTERS_IN_TRAINING,
    CorrectedExperts,
    ExpertsConfig,
    corrected_experts,
    experts,
    read_choice,
    read_corrected,
    read_sparse,
)
from runahead.runtime.models.blocks.partial_rope import rotary_fraction_of
from runahead.runtime.models.config.keys import BIASES_AS_THEY_ARE, unread
from runahead.runtime.models.config.rope_values import rope, rope_of_a_part
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


# ------------------------------------------------------------ GLM-4.5

_GLM4: Final = "Glm4MoeForCausalLM"
_FIRST_DENSE: Final = "first_k_dense_replace"
_SHARED: Final = "n_shared_experts"
_HEADS: Final = "num_nextn_predict_layers", "num_mtp_layers"  # the authors' name, and an alias of transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeConfig(DenseConfig):
    """GLM-4.5's fields. routed: of layers with experts. sparse: by layer, whether it has experts. attention_bias: of
    queries, keys and values. head_norms: normalize each head of queries and keys. heads: draft layers after the last
    one.
    """

    routed: CorrectedExperts
    sparse: tuple[bool, ...]
    head_norms: bool
    heads: int


def _heads(raw: Mapping[str, Any]) -> int:
    given = {key: number(raw, key, int, low=0) for key in _HEADS if raw.get(key) is not None}
    if len(set(given.values())) > 1:
        raise CheckpointError(f"{' and '.join(given)} contradict each other: {given}")
    return next(iter(given.values()), 1)


def _read_glm4(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> Glm4MoeConfig:
    rotary_fraction, layers = rotary_fraction_of(raw, 0.5), number(raw, "num_hidden_layers", int)
    dense, shared = number(raw, _FIRST_DENSE, int, 1, low=0), number(raw, _SHARED, int, 1, low=0)
    shared_size = shared * number(raw, "moe_intermediate_size", int, 1408)
    own: dict[str, Any] = {
        "routed": read_corrected(raw, experts=128, chosen=8, size=1408, shared_size=shared_size),
        "sparse": tuple(layer >= dense for layer in range(layers)),
        "head_norms": flag(raw, "use_qk_norm"),
        "heads": _heads(raw),
    }
    return read_dense(
        Glm4MoeConfig, raw, eos_token_ids, architecture=_GLM4, kv_heads=8, positions=131072, windows=all_tokens,
        eps=1e-5, rope=rope_of_a_part, rotary_fraction=rotary_fraction, flags=("attention_bias",), **own,
    )  # fmt: skip


def _glm4_layer(config: Glm4MoeConfig, number: int, tensors: TensorReader) -> Layer:
    mixer = attention(config, number, tensors, output_bias=False, head_norms=config.head_norms)
    if not config.sparse[number]:
        return Layer(mixer, feed_forward(config, number, tensors))
    hidden, eps, both = config.hidden_size, config.rms_norm_eps, ("gate_proj", "up_proj")
    return Layer(mixer, corrected_experts(config.routed, hidden, eps, number, tensors, first=both, activation="silu"))


def _draft_layers(config: Glm4MoeConfig) -> tuple[str, ...]:
    """Return how names in draft layers begin, whose numbers follow the last layer's."""
    return tuple(f"model.layers.{config.num_layers + head}." for head in range(config.heads))


GLM4_MOE: Final = Architecture(
    name=_GLM4,
    model_type="glm4_moe",
    models="GLM-4.5, GLM-4.5 Air and GLM-4.6",
    layers=("attention", "dense", "experts"),
    understood=READ_BY_DENSE.union(READ_BY_CORRECTED, _HEADS, {_FIRST_DENSE, _SHARED, "attention_bias", "use_qk_norm"})
    - {"sliding_window", "use_sliding_window", "layer_types"},
    unread=(ROUTERS_IN_TRAINING, unread(BIASES_AS_THEY_ARE, "mlp_bias")),
    read=_read_glm4,
    weights=partial(dense_weights, layer=_glm4_layer),
    beside=_draft_layers,
)
