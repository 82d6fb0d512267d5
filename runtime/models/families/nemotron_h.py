"""Nemotron-H: layers that are either a mixer or a feed-forward, in the order of a pattern.

Mixers are Mamba-2, or attention without rotation; a feed-forward has squared ReLU without a gate, dense or with experts
and a shared expert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import Experts, Layer, Mamba2Shape, Ungated
from runahead.runtime.models.architecture import Architecture, ModelWeights, TensorReader
from runahead.runtime.models.blocks.dense import (
    all_tokens,
    attention,
    dense_weights,
    read_dense,
    rope_of,
)
from runahead.runtime.models.blocks.experts import (
    READ_BY_CORRECTED,
    CorrectedExperts,
    corrected_experts,
    read_corrected,
)
from runahead.runtime.models.blocks.mamba2 import SCANS_IN_CHUNKS, Mamba2Config, mamba2, read_limits
from runahead.runtime.models.blocks.mixer_shards import part_of_width
from runahead.runtime.models.config.keys import BIASES_AS_THEY_ARE, READ_BY_ALL, unread
from runahead.runtime.models.config.values import flag, number, refuse_other_code
from runahead.runtime.models.rope import RopeScaling

_NAME: Final = "NemotronHForCausalLM"
_PATTERN: Final = "hybrid_override_pattern"
_KINDS: Final = "layers_block_type"
_LAYERS: Final = "num_hidden_layers"
_HEAD: Final = "head_dim"
_SHARED: Final = "moe_shared_expert_intermediate_size"
_MAMBA2, _ATTENTION, _FEED_FORWARD, _EXPERTS = "M", "*", "-", "E"
# Names of layer kinds in a list, by the authors and by transformers 5, and their letters in a pattern.
_LETTERS: Final = {
    "mamba": _MAMBA2, "linear_attention": _MAMBA2, "attention": _ATTENTION, "full_attention": _ATTENTION,
    "mlp": _FEED_FORWARD, "moe": _EXPERTS,
}  # fmt: skip
# Code that checkpoints name, which is not run: transformers has it under the same names.
_CODE: Final = {
    "AutoConfig": "configuration_nemotron_h.NemotronHConfig", "AutoModel": "modeling_nemotron_h.NemotronHForCausalLM",
    "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
}  # fmt: skip
# The checkpoint's tensor names for the usual names on the left.
_THEIRS: Final = (
    (re.compile(r"model\.embed_tokens\."), "backbone.embeddings."),
    (re.compile(r"model\.norm\."), "backbone.norm_f."),
    (re.compile(r"model\.(layers\.\d+)\.(?:input|post_attention)_layernorm\."), r"backbone.\1.norm."),
    (re.compile(r"model\.(layers\.\d+)\.(?:mamba|self_attn|mlp)\."), r"backbone.\1.mixer."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig(Mamba2Config):
    """Nemotron-H's fields. pattern: a letter a layer: M is Mamba-2, * attention, - a feed-forward, E experts. routed:
    of layers with experts, even if there are none. mlp_bias: also of the shared expert.
    """

    pattern: str
    routed: CorrectedExperts


def _pattern(raw: Mapping[str, Any]) -> str:
    """Return the pattern from the list of layers or the older pattern; `num_hidden_layers` must agree or be absent."""
    named, pattern, layers = raw.get(_KINDS), raw.get(_PATTERN), raw.get(_LAYERS)
    if named is not None:
        if not isinstance(named, list) or any(kind not in tuple(_LETTERS) for kind in named):
            raise CheckpointError(f"{_KINDS} is {named!r}; it must name {', '.join(_LETTERS)} for each layer")
        listed = "".join(_LETTERS[kind] for kind in named)
        if pattern not in (None, listed):
            raise CheckpointError(f"{_PATTERN} is {pattern!r}, and {_KINDS} is {named!r}: they contradict each other")
        pattern = listed
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_LETTERS.values()):
        raise CheckpointError(f"{_PATTERN} is {pattern!r}; it must have a letter of M, *, - and E for each layer")
    if layers not in (None, len(pattern)):
        raise CheckpointError(f"{_LAYERS} is {layers!r}, and {_PATTERN} has {len(pattern)} layers")
    return pattern


def _head_dim(raw: Mapping[str, Any]) -> int:
    older = number(raw, "attention_head_dim", int, number(raw, _HEAD, int, 128))
    found = number(raw, _HEAD, int, older)
    if found != older:
        raise CheckpointError(f"{_HEAD} is {found}, and attention_head_dim {older}: they contradict each other")
    return found


def _mamba2(raw: Mapping[str, Any]) -> Mamba2Shape:
    heads, groups = number(raw, "mamba_num_heads", int, 128), number(raw, "n_groups", int, 8)
    if heads % groups:
        raise CheckpointError(f"mamba_num_heads ({heads}) must be a multiple of n_groups ({groups})")
    head_dim, state = number(raw, "mamba_head_dim", int, 64), number(raw, "ssm_state_size", int, 128)
    return Mamba2Shape(heads, head_dim, groups, state, number(raw, "conv_kernel", int, 4, low=2))


def _refuse_others(raw: Mapping[str, Any]) -> None:
    """Refuse options that no class of this architecture computes."""
    only: dict[str, tuple[Any, ...]] = {
        "mamba_hidden_act": ("silu",), "sliding_window": (None,), "tie_word_embeddings": (None, False),
        "moe_latent_size": (None,),
    }  # fmt: skip
    for key, values in only.items():
        if raw.get(key, values[0]) not in values:
            raise CheckpointError(f"{key} is {raw[key]!r}; only {values[-1]!r} is supported for {_NAME}")
    if read_limits(raw) != (0.0, math.inf):
        raise CheckpointError(
            f"time_step_limit is {raw['time_step_limit']!r}; only [0, Infinity] is supported for {_NAME}, whose steps "
            "are at least time_step_min"
        )
    refuse_other_code(raw, _CODE)


def _plain(raw: Mapping[str, Any], positions: int) -> tuple[float, RopeScaling]:
    return 10000.0, RopeScaling()


# Keys with the same meaning as in other decoders.
_AS_OTHERS: Final = (
    "vocab_size hidden_size max_position_embeddings bos_token_id dtype torch_dtype num_attention_heads "
    "num_key_value_heads mlp_hidden_act"
).split()


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> NemotronHConfig:
    _refuse_others(raw)
    pattern = _pattern(raw)
    sizes: dict[str, Any] = {"num_attention_heads": 32, "mlp_hidden_act": "relu2"}
    sizes |= {key: raw.get(key) for key in _AS_OTHERS if raw.get(key) is not None}
    sizes |= {_LAYERS: len(pattern), _HEAD: _head_dim(raw)}
    sizes |= {"intermediate_size": number(raw, "intermediate_size", int, 21504)}
    sizes |= {"rms_norm_eps": number(raw, "layer_norm_epsilon", float, 1e-5)}
    own: dict[str, Any] = {"pattern": pattern, "recurrent": tuple(letter == _MAMBA2 for letter in pattern)}
    own |= {"mamba": _mamba2(raw), "conv_bias": flag(raw, "use_conv_bias", default=True)}
    own |= {"proj_bias": flag(raw, "use_bias"), "mlp_bias": flag(raw, "mlp_bias")}
    own |= {"dt_limits": (number(raw, "time_step_min", float, 0.001), math.inf)}
    shared_size = number(raw, _SHARED, int, 7688)
    own |= {"routed": read_corrected(raw, experts=8, chosen=2, size=7688, shared_size=shared_size)}
    return read_dense(
        NemotronHConfig, sizes, eos_token_ids, architecture=_NAME, kv_heads=8, positions=4096, windows=all_tokens,
        rope=_plain, required_activation=("mlp_hidden_act", "relu2"), **own,
    )  # fmt: skip


def _feed_forward(config: NemotronHConfig, layer: int, tensors: TensorReader) -> Ungated:
    own, hidden, width, bias = f"model.layers.{layer}.", config.hidden_size, config.intermediate_size, config.mlp_bias
    outputs, inputs = part_of_width(width, tensors.shard, pieces=1)
    return Ungated(
        tensors.norm(f"{own}post_attention_layernorm", hidden, config.rms_norm_eps),
        tensors.linear((f"{own}mlp.up_proj",), (width,), hidden, bias=bias, own=outputs),
        tensors.linear((f"{own}mlp.down_proj",), (hidden,), width, bias=bias, inputs=inputs),
    )


def _experts(config: NemotronHConfig, layer: int, tensors: TensorReader) -> Experts:
    return corrected_experts(
        config.routed, config.hidden_size, config.rms_norm_eps, layer, tensors, first=("up_proj",),
        activation="squared_relu", shared_bias=config.mlp_bias,
    )  # fmt: skip


def _layer(config: NemotronHConfig, number: int, tensors: TensorReader) -> Layer:
    letter = config.pattern[number]
    if letter == _MAMBA2:
        return Layer(mamba2(config, number, tensors), None)
    if letter == _ATTENTION:
        return Layer(attention(config, number, tensors), None)
    return Layer(None, (_experts if letter == _EXPERTS else _feed_forward)(config, number, tensors))


def _renamed(name: str) -> str:
    for ours, theirs in _THEIRS:
        name = ours.sub(theirs, name)
    return name


def _weights(config: NemotronHConfig, tensors: TensorReader) -> ModelWeights:
    return dense_weights(config, tensors.renamed(_renamed), _layer, replace(rope_of(config), rotated=0))


NEMOTRON_H: Final = Architecture(
    name=_NAME,
    model_type="nemotron_h",
    models="Nemotron-H 4B, 8B, 47B and 56B, Nemotron Nano 2, and Nemotron 3 Nano 30B-A3B",
    layers=("attention", "mamba2", "ungated", "experts"),
    understood=READ_BY_ALL.union(
        _AS_OTHERS,
        READ_BY_CORRECTED,
        (_SHARED, "moe_latent_size"),
        (_PATTERN, _KINDS, _HEAD, "attention_head_dim", "intermediate_size", "layer_norm_epsilon", "mlp_bias"),
        "mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel use_conv_bias use_bias".split(),
        "time_step_min time_step_limit mamba_hidden_act sliding_window auto_map".split(),
    ),
    unread=(
        SCANS_IN_CHUNKS,
        unread(
            "The same for this architecture, which names the size of a chunk otherwise; and what a state is kept in, "
            "which is float32 here.",
            "chunk_size mamba_ssm_cache_dtype residual_in_fp32",
        ),
        unread("Follows from the heads: `mamba_num_heads` times `mamba_head_dim`.", "expand"),
        unread("The epsilon of norms is `layer_norm_epsilon`.", "rms_norm_eps norm_eps"),
        unread("Attention rotates nothing.", "rope_theta rope_scaling rope_parameters partial_rotary_factor"),
        unread(BIASES_AS_THEY_ARE, "attention_bias mamba_proj_bias"),
        unread(
            "Of training: how weights were drawn at its beginning, and what was dropped.",
            "time_step_max time_step_floor time_step_rank rescale_prenorm_residual hidden_dropout",
        ),
        unread("Which logits a library returns.", "num_logits_to_keep output_router_logits"),
        unread(
            "Of what every token gets beside experts: `moe_shared_expert_intermediate_size` says how wide all of it "
            "is, and when a library computes it changes nothing.",
            "n_shared_experts moe_shared_expert_overlap",
        ),
        unread(
            "Of layers that guess further tokens, which are not read.",
            "num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern",
        ),
    ),
    read=_read,
    weights=_weights,
    beside=lambda config: ("mtp.",),
)
