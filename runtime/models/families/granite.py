"""Granite 3 and 4: multipliers of embeddings, residual sums, scores and logits.

The residual is stored divided by `residual_multiplier`: additions then need no factor, embeddings are multiplied by the
inverse as well, and norms are unchanged with an epsilon divided by the square. The logits' divisor is in the final
norm's weight, in float32.

Granite 3 is a Llama with them. Granite 4 hybrids have Mamba-2 in most layers, attention in the others, and in each a
shared feed-forward with or without experts. Their attention rotates nothing unless `position_embedding_type` is rope.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from runahead.runtime.checkpoint import CheckpointError, StoredTensor
from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.layers import Dense, FeedForward, Layer, Norm
from runahead.runtime.models.architecture import Architecture, ModelWeights, TensorReader, computed
from runahead.runtime.models.blocks.dense import (
    READ_BY_DENSE,
    DenseConfig,
    LayerOf,
    all_tokens,
    attention,
    dense_weights,
    feed_forward,
    no_windows,
    read_dense,
    rope_of,
)
from runahead.runtime.models.blocks.experts import ROUTERS_IN_TRAINING, experts_of, shared_expert, unstacked
from runahead.runtime.models.blocks.mamba2 import (
    READ_BY_MAMBA2,
    SCANS_IN_CHUNKS,
    Mamba2Config,
    mamba2,
    read_mamba2,
)
from runahead.runtime.models.config.keys import BIASES_AS_THEY_ARE, unread
from runahead.runtime.models.config.values import by_layer, number
from runahead.runtime.models.rope import Rope

_NAME: Final = "GraniteForCausalLM"
_HYBRID: Final = "GraniteMoeHybridForCausalLM"
_BIASES: Final = ("attention_bias", "mlp_bias")
_MULTIPLIERS: Final = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_EXPERTS: Final = "num_local_experts"
_CHOSEN: Final = "num_experts_per_tok"
_SHARED: Final = "shared_intermediate_size"
_KINDS: Final = "layer_types"
_POSITIONS: Final = "position_embedding_type"
_NORMS: Final = "normalization_function"
_STACKED: Final = re.compile(
    r"(?P<of>model\.layers\.\d+\.block_sparse_moe)\.(?:(?P<first>input_linear)|output_linear)\.weight"
)
# Layer kinds by the authors' names and by transformers 5's.
_RECURRENT: Final = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(DenseConfig):
    """Granite's fields. embedding_multiplier: of embeddings. residual_multiplier: of the outputs of mixers and
    feed-forwards. attention_multiplier: of scores, instead of 1 / sqrt(head_dim). logits_scaling: divides the logits.
    """

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteHybridConfig(Mamba2Config):
    """Granite 4 hybrids' fields. experts: of every layer; 0: none. chosen: of a token. shared_size: intermediate size
    of the shared feed-forward; intermediate_size is an expert's. rotates_any: attention rotates queries and keys. The
    rest as in `GraniteConfig`.
    """

    experts: int
    chosen: int
    shared_size: int
    rotates_any: bool
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0


_Config = TypeVar("_Config", GraniteConfig, GraniteHybridConfig)


def _multipliers(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: number(raw, key, float, 1.0) for key in _MULTIPLIERS}


def _divided_weights(config: _Config, tensors: TensorReader, layer: LayerOf[_Config], *ropes: Rope) -> ModelWeights:
    """Build the weights with the residual divided by its multiplier, and the norms' epsilon by the square."""
    multiplier = config.residual_multiplier
    divided = replace(config, rms_norm_eps=config.rms_norm_eps / multiplier**2)
    weights = dense_weights(divided, tensors, layer, *ropes, embedding_scale=config.embedding_multiplier / multiplier)
    last, scaling = weights.final_norm, config.logits_scaling
    return replace(weights, final_norm=Norm(computed(last.weight, lambda weight: weight / scaling), last.eps))


# ------------------------------------------------------------ Granite 3


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> GraniteConfig:
    return read_dense(
        GraniteConfig, raw, eos_token_ids, architecture=_NAME, kv_heads=None, positions=2048, windows=no_windows,
        flags=_BIASES, **_multipliers(raw),
    )  # fmt: skip


def _layer(config: GraniteConfig, number: int, tensors: TensorReader) -> Layer:
    mixer = attention(config, number, tensors, scale=config.attention_multiplier)
    return Layer(mixer, feed_forward(config, number, tensors))


def _weights(config: GraniteConfig, tensors: TensorReader) -> ModelWeights:
    return _divided_weights(config, tensors, _layer)


GRANITE: Final = Architecture(
    name=_NAME,
    model_type="granite",
    models="Granite 3 without experts",
    understood=READ_BY_DENSE.union(_BIASES, _MULTIPLIERS),
    unread=(),
    read=_read,
    weights=_weights,
)


# ------------------------------------------------------------ Granite 4 hybrids


def _recurrent(raw: Mapping[str, Any]) -> list[bool]:
    layers = number(raw, "num_hidden_layers", int)
    return list(by_layer(raw, layers, _RECURRENT) or (True,) * layers)


def _rotates_any(raw: Mapping[str, Any]) -> bool:
    kind = raw.get(_POSITIONS)
    if kind not in (None, "nope", "rope"):
        raise CheckpointError(f"{_POSITIONS} is {kind!r}; it must be rope, or nope or null")
    return kind == "rope"


def _read_hybrid(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> GraniteHybridConfig:
    if raw.get(_NORMS) not in (None, "rmsnorm"):
        raise CheckpointError(f"{_NORMS} is {raw[_NORMS]!r}; only 'rmsnorm' is supported")
    experts, chosen = number(raw, _EXPERTS, int, 8, low=0), number(raw, _CHOSEN, int, 2, low=0)
    if experts and not 0 < chosen <= experts:
        raise CheckpointError(f"{_CHOSEN} is {chosen}, and there are {experts} experts")
    return read_dense(
        GraniteHybridConfig, raw, eos_token_ids, architecture=_HYBRID, kv_heads=None, positions=2048,
        windows=all_tokens, flags=("attention_bias",), experts=experts, chosen=chosen,
        shared_size=number(raw, _SHARED, int, 1024), rotates_any=_rotates_any(raw), **_multipliers(raw),
        **read_mamba2(raw, _recurrent(raw)),
    )  # fmt: skip


def _feed_forward(config: GraniteHybridConfig, layer: int, tensors: TensorReader) -> FeedForward:
    """Build a layer's feed-forward, or the rank's part of its widths. Raises ShardError."""
    own, hidden, width = f"model.layers.{layer}.", config.hidden_size, config.shared_size
    norm = tensors.norm(f"{own}post_attention_layernorm", hidden, config.rms_norm_eps)
    names, beside = ("input_linear", "output_linear"), bool(config.experts)
    shared = shared_expert(width, hidden, f"{own}shared_mlp.", tensors, names, pieces=2, dequantized=beside)
    if not config.experts:
        return Dense(norm, shared.gate_up, shared.down)
    count, block, choice = config.experts, f"{own}block_sparse_moe.", Choice(config.chosen, renormalised=True)
    each, projections = [f"{block}{number}." for number in range(count)], ("gate_proj", "up_proj", "down_proj")
    router = tensors.linear((f"{block}router.layer",), (count,), hidden, bias=False, dequantized=True)
    found = experts_of(norm, router, choice, each, projections, config.intermediate_size, hidden, tensors)
    return replace(found, shared=shared)


def _unstacked(config: GraniteHybridConfig, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    return unstacked(stored, _STACKED, config.experts, config.intermediate_size, config.hidden_size)


def _hybrid_weights(config: GraniteHybridConfig, tensors: TensorReader) -> ModelWeights:
    eps, scale = config.rms_norm_eps, config.attention_multiplier

    def layer(divided: GraniteHybridConfig, number: int, tensors: TensorReader) -> Layer:
        second = _feed_forward(divided, number, tensors)
        if config.recurrent[number]:
            return Layer(mamba2(divided, number, tensors, eps=eps), second)
        return Layer(attention(divided, number, tensors, scale=scale), second)

    rope = rope_of(config)
    return _divided_weights(config, tensors, layer, rope if config.rotates_any else replace(rope, rotated=0))


GRANITE_HYBRID: Final = Architecture(
    name=_HYBRID,
    model_type="granitemoehybrid",
    models="Granite 4.0 hybrids: H Micro, H Tiny, H Small, H 1B and H 350M",
    layers=("attention", "mamba2", "dense", "experts"),
    understood=READ_BY_MAMBA2.union(_MULTIPLIERS, {_EXPERTS, _CHOSEN, _SHARED, _KINDS, _POSITIONS, _NORMS})
    | {"attention_bias"},
    unread=(
        SCANS_IN_CHUNKS,
        ROUTERS_IN_TRAINING,
        unread(BIASES_AS_THEY_ARE, "mlp_bias"),
        unread("Of training: how the weights were drawn at its beginning.", "init_method"),
    ),
    read=_read_hybrid,
    weights=_hybrid_weights,
    unstacked=_unstacked,
)
