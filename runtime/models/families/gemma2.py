"""Gemma 2: the four norms of a layer that Gemma 3 has, one rope, and scores and logits that a tanh bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from runahead.runtime.checkpoint import CheckpointError
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
    window_size,
    windows_by_type,
)
from runahead.runtime.models.blocks.norms import one_added, with_one_added
from runahead.runtime.models.config.keys import unread
from runahead.runtime.models.config.values import number

_NAME: Final = "Gemma2ForCausalLM"
_SCORES, _LOGITS = "attn_logit_softcapping", "final_logit_softcapping"
_ACTIVATION: Final = "hidden_activation", "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(DenseConfig):
    """score_cap, logit_cap: what bounds the scores of attention, and the logits; 0: nothing does. The rest as in
    `runahead.runtime.models.families.gemma3.Gemma3Config`."""

    score_cap: float = 0.0
    logit_cap: float = 0.0
    query_pre_attn_scalar: float = 256.0


def _windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """As `layer_types` says; without it, on every layer but each second."""
    window, kinds = window_size(raw.get("sliding_window", 4096)), raw.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    return windows_by_type({**raw, "layer_types": kinds}, architecture, layers, window) or ()


def _cap(raw: Mapping[str, Any], key: str, default: float) -> float:
    """null: nothing is bounded."""
    return 0.0 if key in raw and raw[key] is None else number({key: raw.get(key)}, key, float, default)


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> Gemma2Config:
    older = raw.get("hidden_act")
    if older not in (None, "gelu", "gelu_pytorch_tanh"):  # which the class of transformers does not read
        raise CheckpointError(f"hidden_act is {older!r}; {_NAME} has GELU, by its formula with tanh")
    return read_dense(
        Gemma2Config, raw, eos_token_ids, architecture=_NAME, kv_heads=4, positions=8192, windows=_windows,
        head_dim=256, tied=True, activation=_ACTIVATION, flags=("attention_bias",),
        query_pre_attn_scalar=number(raw, "query_pre_attn_scalar", float, 256.0),
        score_cap=_cap(raw, _SCORES, 50.0), logit_cap=_cap(raw, _LOGITS, 30.0),
    )  # fmt: skip


def _layer(config: Gemma2Config, number: int, tensors: TensorReader) -> Layer:
    scale = config.query_pre_attn_scalar**-0.5
    mixer = attention(config, number, tensors, scale=scale, post_norm="post_attention_layernorm")
    dense = feed_forward(
        config, number, tensors, activation="gelu_tanh", norm="pre_feedforward_layernorm",
        post_norm="post_feedforward_layernorm",
    )  # fmt: skip
    return Layer(with_one_added(replace(mixer, score_cap=config.score_cap)), with_one_added(dense))


def _weights(config: Gemma2Config, tensors: TensorReader) -> ModelWeights:
    weights = dense_weights(config, tensors, _layer)
    scale = torch.tensor(config.hidden_size**0.5, dtype=weights.embedding.dtype)  # rounded as the embedding is
    last = one_added(weights.final_norm)
    return replace(weights, final_norm=last, embedding_scale=float(scale), logit_cap=config.logit_cap)


GEMMA2: Final = Architecture(
    name=_NAME,
    model_type="gemma2",
    models="Gemma 2: 2B, 9B and 27B",
    layers=("attention", "window", "dense"),
    understood=(READ_BY_DENSE - {"use_sliding_window"}).union(
        {"hidden_activation", "query_pre_attn_scalar", "attention_bias", _SCORES, _LOGITS}
    ),
    unread=(unread("How a library keeps keys and values.", "cache_implementation"),),
    read=_read,
    weights=_weights,
    passed_over=passed_over,
)
