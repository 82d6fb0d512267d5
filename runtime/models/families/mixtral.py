"""Mixtral: a Mistral whose every feed-forward is experts, without a window unless `config.json` gives one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.architecture import Architecture, ModelWeights, TensorReader
from runahead.runtime.models.blocks.dense import (
    attention,
    dense_weights,
    one_window,
    passed_over,
    read_dense,
)
from runahead.runtime.models.blocks.experts import (
    READ_BY_EXPERTS,
    ROUTERS_IN_TRAINING,
    ExpertsConfig,
    experts,
    read_choice,
    small_with_experts,
)
from runahead.runtime.models.config.keys import BIASES_AS_THEY_ARE, unread
from runahead.runtime.models.config.rope_values import rope
from runahead.runtime.models.config.values import number

_NAME: Final = "MixtralForCausalLM"
_EXPERTS: Final = "num_local_experts"


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> ExpertsConfig:
    own: dict[str, Any] = {
        **read_choice(raw, (_EXPERTS,), experts=8, chosen=2),
        "expert_size": number(raw, "intermediate_size", int),
        "renormalised": True,
        "sparse": (True,) * number(raw, "num_hidden_layers", int),
    }
    return read_dense(
        ExpertsConfig, raw, eos_token_ids, architecture=_NAME, kv_heads=8, positions=131072, windows=one_window,
        eps=1e-5, rope=partial(rope, theta=1e6), **own,
    )  # fmt: skip


def _layer(config: ExpertsConfig, number: int, tensors: TensorReader) -> Layer:
    mixer = attention(config, number, tensors)
    return Layer(mixer, experts(config, number, tensors, block="block_sparse_moe", projections=("w1", "w3", "w2")))


def _weights(config: ExpertsConfig, tensors: TensorReader) -> ModelWeights:
    return dense_weights(config, tensors, _layer)


MIXTRAL: Final = Architecture(
    name=_NAME,
    model_type="mixtral",
    models="Mixtral 8x7B and 8x22B",
    layers=("attention", "window", "experts"),
    understood=(READ_BY_EXPERTS | {_EXPERTS}) - {"use_sliding_window"},
    unread=(ROUTERS_IN_TRAINING, unread(BIASES_AS_THEY_ARE, "attention_bias mlp_bias")),
    read=_read,
    weights=_weights,
    passed_over=passed_over,
    small=small_with_experts,
)
