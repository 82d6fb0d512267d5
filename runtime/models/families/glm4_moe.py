"""GLM-4.5: partial rope; first layers with a dense feed-forward, the others with experts chosen by corrected scores and
a shared expert.
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
    read_dense,
)
from runahead.runtime.models.blocks.experts import (
    READ_BY_CORRECTED,
    ROUTERS_IN_TRAINING,
    CorrectedExperts,
    corrected_experts,
    read_corrected,
)
from runahead.runtime.models.blocks.partial_rope import share_of
from runahead.runtime.models.config.keys import BIASES_AS_THEY_ARE, unread
from runahead.runtime.models.config.rope_values import rope_of_a_part
from runahead.runtime.models.config.values import flag, number

_NAME: Final = "Glm4MoeForCausalLM"
_DENSE: Final = "first_k_dense_replace"
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


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> Glm4MoeConfig:
    share, layers = share_of(raw, 0.5), number(raw, "num_hidden_layers", int)
    dense, shared = number(raw, _DENSE, int, 1, low=0), number(raw, _SHARED, int, 1, low=0)
    shared_size = shared * number(raw, "moe_intermediate_size", int, 1408)
    own: dict[str, Any] = {
        "routed": read_corrected(raw, experts=128, chosen=8, size=1408, shared_size=shared_size),
        "sparse": tuple(layer >= dense for layer in range(layers)),
        "head_norms": flag(raw, "use_qk_norm"),
        "heads": _heads(raw),
    }
    return read_dense(
        Glm4MoeConfig, raw, eos_token_ids, architecture=_NAME, kv_heads=8, positions=131072, windows=all_tokens,
        eps=1e-5, rope=rope_of_a_part, share=share, flags=("attention_bias",), **own,
    )  # fmt: skip


def _layer(config: Glm4MoeConfig, number: int, tensors: TensorReader) -> Layer:
    mixer = attention(config, number, tensors, output_bias=False, head_norms=config.head_norms)
    if not config.sparse[number]:
        return Layer(mixer, feed_forward(config, number, tensors))
    hidden, eps, both = config.hidden_size, config.rms_norm_eps, ("gate_proj", "up_proj")
    return Layer(mixer, corrected_experts(config.routed, hidden, eps, number, tensors, first=both, activation="silu"))


def _draft_layers(config: Glm4MoeConfig) -> tuple[str, ...]:
    """Return how names in draft layers begin, whose numbers follow the last layer's."""
    return tuple(f"model.layers.{config.num_layers + head}." for head in range(config.heads))


GLM4_MOE: Final = Architecture(
    name=_NAME,
    model_type="glm4_moe",
    models="GLM-4.5, GLM-4.5 Air and GLM-4.6",
    layers=("attention", "dense", "experts"),
    understood=READ_BY_DENSE.union(READ_BY_CORRECTED, _HEADS, {_DENSE, _SHARED, "attention_bias", "use_qk_norm"})
    - {"sliding_window", "use_sliding_window", "layer_types"},
    unread=(ROUTERS_IN_TRAINING, unread(BIASES_AS_THEY_ARE, "mlp_bias")),
    read=_read,
    weights=partial(dense_weights, layer=_layer),
    beside=_draft_layers,
)
