"""Gemma 2 and 3, text only: four norms a layer, whose weight is the checkpoint's plus one.

Gemma 2 has one rope, and soft caps of scores and logits. Gemma 3 has two ropes, for layers with and without a window.
From 4B on its published checkpoint is multimodal, of which the text part is served. Its file omits the library's
default values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import Attention, Layer
from runahead.runtime.models.architecture import Architecture, ModelWeights, TensorReader, Whole
from runahead.runtime.models.blocks.dense import (
    READ_BY_DENSE,
    DenseConfig,
    attention,
    dense_weights,
    feed_forward,
    one_added,
    read_dense,
    rope_of,
    window_size,
    windows_by_type,
    with_one_added,
)
from runahead.runtime.models.config.keys import Unread, unread
from runahead.runtime.models.config.rope_values import refuse_partial, rope_scaling
from runahead.runtime.models.config.values import number
from runahead.runtime.models.rope import Rope, RopeScaling

_GEMMA2, _GEMMA3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_OF_FULL, _OF_SLIDING = 0, 1  # indexes of Gemma 3's ropes
_SCORES, _LOGITS = "attn_logit_softcapping", "final_logit_softcapping"
_ACTIVATION: Final = "hidden_activation", "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(DenseConfig):
    """Fields of both. query_pre_attn_scalar: scores are divided by its square root."""

    query_pre_attn_scalar: float = 256.0


def _windows(raw: Mapping[str, Any], architecture: str, layers: int, every: int) -> tuple[int, ...]:
    """Return windows from `layer_types`; without it, on all layers but each `every`-th."""
    window, kinds = window_size(raw.get("sliding_window", 4096)), raw.get("layer_types")
    if kinds is None:
        kinds = [_FULL if (layer + 1) % every == 0 else _SLIDING for layer in range(layers)]
    return windows_by_type({**raw, "layer_types": kinds}, architecture, layers, window) or ()


def _layer(config: GemmaConfig, number: int, tensors: TensorReader, **own: Any) -> Layer:
    """Build a layer. own: arguments of `attention`."""
    mixer = attention(
        config, number, tensors, scale=config.query_pre_attn_scalar**-0.5, post_norm="post_attention_layernorm", **own
    )
    dense = feed_forward(
        config, number, tensors, activation="gelu_tanh", norm="pre_feedforward_layernorm",
        post_norm="post_feedforward_layernorm",
    )  # fmt: skip
    return Layer(with_one_added(mixer), with_one_added(dense))


def _scaled(weights: ModelWeights, config: GemmaConfig) -> ModelWeights:
    scale = torch.tensor(config.hidden_size**0.5, dtype=weights.embedding.dtype)  # rounded like the embedding
    return replace(weights, final_norm=one_added(weights.final_norm), embedding_scale=float(scale))


# ------------------------------------------------------------ Gemma 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(GemmaConfig):
    """Gemma 2's fields. score_cap, logit_cap: soft caps of scores and logits; 0: none."""

    score_cap: float = 0.0
    logit_cap: float = 0.0


def _cap(raw: Mapping[str, Any], key: str, default: float) -> float:
    """Read a cap; null: none."""
    return 0.0 if key in raw and raw[key] is None else number({key: raw.get(key)}, key, float, default)


def _read_gemma2(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> Gemma2Config:
    older = raw.get("hidden_act")
    if older not in (None, "gelu", "gelu_pytorch_tanh"):  # not read by the class of transformers
        raise CheckpointError(f"hidden_act is {older!r}; {_GEMMA2} has GELU, by its formula with tanh")
    return read_dense(
        Gemma2Config, raw, eos_token_ids, architecture=_GEMMA2, kv_heads=4, positions=8192,
        windows=partial(_windows, every=2), head_dim=256, tied=True, required_activation=_ACTIVATION,
        flags=("attention_bias",),
        query_pre_attn_scalar=number(raw, "query_pre_attn_scalar", float, 256.0),
        score_cap=_cap(raw, _SCORES, 50.0), logit_cap=_cap(raw, _LOGITS, 30.0),
    )  # fmt: skip


def _gemma2_layer(config: Gemma2Config, number: int, tensors: TensorReader) -> Layer:
    layer = _layer(config, number, tensors)
    assert isinstance(layer.mixer, Attention)
    return replace(layer, mixer=replace(layer.mixer, score_cap=config.score_cap))


def _gemma2_weights(config: Gemma2Config, tensors: TensorReader) -> ModelWeights:
    return replace(_scaled(dense_weights(config, tensors, _gemma2_layer), config), logit_cap=config.logit_cap)


GEMMA2: Final = Architecture(
    name=_GEMMA2,
    model_type="gemma2",
    models="Gemma 2: 2B, 9B and 27B",
    layers=("attention", "window", "dense"),
    understood=(READ_BY_DENSE - {"use_sliding_window"}).union(
        {"hidden_activation", "query_pre_attn_scalar", "attention_bias", _SCORES, _LOGITS}
    ),
    unread=(unread("How a library keeps keys and values.", "cache_implementation"),),
    read=_read_gemma2,
    weights=_gemma2_weights,
)


# ------------------------------------------------------------ Gemma 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """Gemma 3's fields. rope_theta, rope_scaling: of layers without a window; sliding_theta, sliding_scaling: with
    one.
    """

    sliding_theta: float = 10000.0
    sliding_scaling: RopeScaling = field(default_factory=RopeScaling)


def _ropes(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rope object of each type of layer, from `rope_parameters` or older keys."""
    given = raw.get("rope_parameters")
    given = {} if given is None else given
    is_object = isinstance(given, dict) and given.keys() <= {_FULL, _SLIDING}
    if not is_object or any(not isinstance(one, dict | None) for one in given.values()):
        raise CheckpointError(f"rope_parameters is {given!r}; it must be an object for each of {_FULL} and {_SLIDING}")
    older = raw.get("rope_scaling")
    if not isinstance(older, dict | None):
        raise CheckpointError(f"rope_scaling is {older!r}; it must be an object")
    thetas = {_FULL: raw.get("rope_theta"), _SLIDING: raw.get("rope_local_base_freq")}
    found = {kind: {"rope_theta": theta, **(given.get(kind) or {})} for kind, theta in thetas.items()}
    found[_FULL] |= older or {}
    return found


def _rope(found: Mapping[str, Any], positions: int, theta: float) -> tuple[float, RopeScaling]:
    refuse_partial(found)
    scaling = rope_scaling("rope_parameters", found, positions)
    return number(found, "rope_theta", float, theta), scaling


def _patterned(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    return _windows(raw, architecture, layers, number(raw, "sliding_window_pattern", int, 6))


def _read_gemma3(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> Gemma3Config:
    ropes = _ropes(raw)
    read = read_dense(
        Gemma3Config, raw, eos_token_ids, architecture=_GEMMA3, query_heads=8, kv_heads=4,
        positions=131072, windows=_patterned, head_dim=256, vocab=262208, tied=True,
        rope=lambda _, positions: _rope(ropes[_FULL], positions, 1e6),
        required_activation=_ACTIVATION, flags=("attention_bias",),
        query_pre_attn_scalar=number(raw, "query_pre_attn_scalar", float, 256.0),
    )  # fmt: skip
    theta, scaling = _rope(ropes[_SLIDING], read.max_position_embeddings, 1e4)
    return replace(read, sliding_theta=theta, sliding_scaling=scaling)


def _gemma3_layer(config: Gemma3Config, number: int, tensors: TensorReader) -> Layer:
    rope = _OF_SLIDING if config.windows[number] else _OF_FULL
    return _layer(config, number, tensors, head_norms=True, rope=rope)


def _gemma3_weights(config: Gemma3Config, tensors: TensorReader) -> ModelWeights:
    sliding = Rope(config.head_dim, config.sliding_theta, config.sliding_scaling)
    return _scaled(dense_weights(config, tensors, _gemma3_layer, rope_of(config), sliding), config)


_PARTS_OF_PICTURES: Final = ("vision_tower.", "multi_modal_projector.")
_OF_PICTURES: Final[tuple[Unread, ...]] = (
    unread(
        "Of pictures, which are not served.",
        "vision_config boi_token_index eoi_token_index image_token_index image_token_id mm_tokens_per_image",
    ),
)


def _is_of_pictures(name: str) -> bool:
    return name.removeprefix("model.").startswith(_PARTS_OF_PICTURES)


GEMMA3: Final = Architecture(
    name=_GEMMA3,
    model_type="gemma3_text",
    models="Gemma 3, text alone: 270M to 27B",
    layers=("attention", "window", "dense"),
    understood=READ_BY_DENSE.difference(
        "hidden_act use_sliding_window partial_rotary_factor original_max_position_embeddings".split()
    ).union(
        "hidden_activation query_pre_attn_scalar sliding_window_pattern rope_local_base_freq attention_bias".split()
    ),
    unread=(
        unread("How a library keeps keys and values.", "cache_implementation"),
        unread("What a library has noted of a pattern that `layer_types` says too.", "_sliding_window_pattern"),
    ),
    read=_read_gemma3,
    weights=_gemma3_weights,
    whole=Whole(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        # As transformers saves it now, and as in the published files.
        (("model.language_model.", "model."), ("language_model.", "")),
        _OF_PICTURES,
        _is_of_pictures,
    ),
)
