"""Qwen3.5, text only: Qwen3-Next with other tensor names of gated delta nets, and in every layer a dense feed-forward,
or experts with a gated shared expert.

The published checkpoint is multimodal, of which the text part is served. Text tokens have equal positions in time,
height and width, so the division of a head among these has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.architecture import Architecture, TensorReader, Whole
from runahead.runtime.models.blocks.dense import READ_BY_DENSE, all_tokens, read_dense
from runahead.runtime.models.blocks.experts import ROUTERS_IN_TRAINING, one_by_one, read_choice
from runahead.runtime.models.blocks.partial_rope import rotary_fraction_of
from runahead.runtime.models.config.keys import BIASES_AS_THEY_ARE, Unread, unread
from runahead.runtime.models.config.rope_values import rope_object, rope_of_a_part
from runahead.runtime.models.config.values import flag, number
from runahead.runtime.models.families.qwen3_next import (
    OWN_HEADS,
    READ_OF_DELTA,
    Qwen3NextConfig,
    delta_weights,
    dense_or_experts,
    gated_attention,
    gated_delta,
    read_delta,
    read_recurrent,
)
from runahead.runtime.models.rope import RopeScaling

_DENSE, _SPARSE = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
_SHARED_POSITIONS: Final = frozenset({"mrope_section", "mrope_interleaved"})
_EXPERTS: Final = "num_experts", "num_local_experts"
_HEADS: Final = "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"
_PROJECTIONS: Final = "in_proj_z", "in_proj_qkv", "in_proj_b", "in_proj_a"


_SIZES: Final = (READ_BY_DENSE | {"attention_bias"}) - {"sliding_window", "use_sliding_window"}


def _rope(raw: Mapping[str, Any], positions: int) -> tuple[float, RopeScaling]:
    key, found = rope_object(raw)
    found = {name: value for name, value in found.items() if name not in _SHARED_POSITIONS}
    return rope_of_a_part({**raw, key: found}, positions)


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...], *, name: str, experts: bool) -> Qwen3NextConfig:
    if not flag(raw, "attn_output_gate", default=True):
        raise CheckpointError(f"attn_output_gate is {raw['attn_output_gate']!r}; only true is supported for {name}")
    if raw.get("mlp_only_layers") not in (None, []):
        raise CheckpointError(f"mlp_only_layers is {raw['mlp_only_layers']!r}; the layers of {name} are all alike")
    own: dict[str, Any] = {"experts": 0, "chosen": 0, "expert_size": 0, "shared_size": 0}
    if experts:
        own = {
            **read_choice(raw, _EXPERTS, experts=256, chosen=8),
            "expert_size": number(raw, "moe_intermediate_size", int, 512),
            "shared_size": number(raw, "shared_expert_intermediate_size", int, 512),
        }
    own |= {
        "renormalised": True,
        "sparse": (experts,) * number(raw, "num_hidden_layers", int),
        "recurrent": read_recurrent(raw),
    }
    own |= {"delta": read_delta(raw)}
    own |= {"heads": number(raw, _HEADS[0], int, 1, low=0), "heads_embed": flag(raw, _HEADS[1])}
    sizes = {key: raw.get(key) for key in _SIZES}
    sizes = {key: value for key, value in sizes.items() if value is not None}
    sizes |= {"intermediate_size": number(raw, "intermediate_size", int, 12288)}
    return read_dense(
        Qwen3NextConfig, sizes, eos_token_ids, architecture=name, kv_heads=2 if experts else 4, positions=32768,
        windows=all_tokens, head_dim=256, rope=_rope, rotary_fraction=rotary_fraction_of(raw, 0.25),
        flags=("attention_bias",), **own,
    )  # fmt: skip


def _layer(config: Qwen3NextConfig, number: int, tensors: TensorReader) -> Layer:
    shape = config.delta
    if config.recurrent[number]:
        rows = (shape.inner, 2 * shape.keys + shape.inner, shape.value_heads, shape.value_heads)
        mixer = gated_delta(config, number, tensors, _PROJECTIONS, rows)
        return Layer(mixer, dense_or_experts(config, number, tensors))
    return Layer(gated_attention(config, number, tensors), dense_or_experts(config, number, tensors))


_PREFIXES: Final = (("model.language_model.", "model."),)


def _is_of_pictures(name: str) -> bool:
    return name.startswith("model.visual.")


_UNREAD: Final = (
    unread("What a state is kept in, which is float32 here.", "mamba_ssm_dtype"),
    unread(BIASES_AS_THEY_ARE, "mlp_bias"),
)
_OF_PICTURES: Final[tuple[Unread, ...]] = (
    unread(
        "Of pictures and films, which are not served.",
        "vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id language_model_only",
    ),
)
_UNDERSTOOD: Final = _SIZES.union(
    READ_OF_DELTA,
    _HEADS,
    {"layer_types", "full_attention_interval", "attn_output_gate", "mlp_only_layers"},
)

QWEN3_5: Final = Architecture(
    name=_DENSE,
    model_type="qwen3_5_text",
    models="Qwen3.5 without experts, 0.8B to 27B",
    understood=_UNDERSTOOD,
    unread=_UNREAD,
    read=partial(_read, name=_DENSE, experts=False),
    weights=partial(delta_weights, layer=_layer),
    layers=("attention", "gated_delta", "dense"),
    heads=OWN_HEADS,
    whole=Whole("Qwen3_5ForConditionalGeneration", "qwen3_5", _PREFIXES, _OF_PICTURES, _is_of_pictures),
)
QWEN3_5_MOE: Final = Architecture(
    name=_SPARSE,
    model_type="qwen3_5_moe_text",
    models="Qwen3.5 with experts, 35B-A3B to 397B-A17B",
    understood=_UNDERSTOOD.union(
        _EXPERTS, {"num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"}
    ),
    unread=(
        *_UNREAD,
        ROUTERS_IN_TRAINING,
        unread(
            "Every layer has experts, and the shares of a token's add up to one.", "norm_topk_prob decoder_sparse_step"
        ),
    ),
    read=partial(_read, name=_SPARSE, experts=True),
    weights=partial(delta_weights, layer=_layer),
    layers=("attention", "gated_delta", "experts"),
    heads=OWN_HEADS,
    unstacked=one_by_one,
    whole=Whole("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", _PREFIXES, _OF_PICTURES, _is_of_pictures),
)
