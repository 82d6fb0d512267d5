"""Bamba: Mamba-2 in all layers but those that are named, which have attention over heads rotated by half."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.architecture import Architecture, ModelWeights, TensorReader
from runahead.runtime.models.blocks.dense import (
    all_tokens,
    attention,
    dense_weights,
    feed_forward,
    passed_over,
    read_dense,
    rope_of,
)
from runahead.runtime.models.blocks.mamba2 import (
    READ_BY_MAMBA2,
    SCANS_IN_CHUNKS,
    Mamba2Config,
    mamba2,
    read_mamba2,
    small_hybrid,
)
from runahead.runtime.models.blocks.partial_rope import order_of_qkv, rotated_of, share_of
from runahead.runtime.models.config.keys import unread
from runahead.runtime.models.config.rope_values import rope_of_a_part
from runahead.runtime.models.config.values import flag, number

_NAME: Final = "BambaForCausalLM"
_ATTENTION: Final = "attn_layer_indices"
_SHARE: Final = 0.5  # of a head, that is rotated, whatever the file says


@dataclass(frozen=True, slots=True, kw_only=True)
class BambaConfig(Mamba2Config):
    """rotated: numbers of a head that are rotated, its first. attention_bias: of queries, keys, values and the
    attention's output. mlp_bias: of the feed-forward."""

    rotated: int
    attention_bias: bool = False
    mlp_bias: bool = False


def _recurrent(raw: Mapping[str, Any]) -> list[bool]:
    layers, named = number(raw, "num_hidden_layers", int), raw.get(_ATTENTION)
    named = [] if named is None else named
    fits = isinstance(named, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in named)
    if not fits or any(not 0 <= one < layers for one in named):
        raise CheckpointError(f"{_ATTENTION} is {named!r}; it must be a list of layers, from 0 to {layers - 1}")
    return [layer not in named for layer in range(layers)]


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> BambaConfig:
    share = share_of(raw, _SHARE)
    if share != _SHARE:
        raise CheckpointError(f"partial_rotary_factor is {share!r}; that of {_NAME} is {_SHARE}")
    own: dict[str, Any] = {key: flag(raw, key) for key in ("attention_bias", "mlp_bias")}
    read = read_dense(
        BambaConfig, raw, eos_token_ids, architecture=_NAME, kv_heads=8, positions=262144, windows=all_tokens, eps=1e-5,
        rope=rope_of_a_part, share=share, rotated=0, **read_mamba2(raw, _recurrent(raw)), **own,
    )  # fmt: skip
    return replace(read, rotated=rotated_of(read.head_dim, share))


def _layer(config: BambaConfig, number: int, tensors: TensorReader) -> Layer:
    bias, order = config.attention_bias, order_of_qkv(config, config.rotated)
    second = feed_forward(config, number, tensors, bias=config.mlp_bias, block="feed_forward", norm="pre_ff_layernorm")
    if config.recurrent[number]:
        return Layer(mamba2(config, number, tensors), second)
    return Layer(attention(config, number, tensors, qkv_bias=bias, output_bias=bias, order=order), second)


def _weights(config: BambaConfig, tensors: TensorReader) -> ModelWeights:
    rope = replace(rope_of(config), rotated=config.rotated)
    return dense_weights(config, tensors, _layer, rope, final_norm="model.final_layernorm")


BAMBA: Final = Architecture(
    name=_NAME,
    model_type="bamba",
    models="Bamba 9B, 1 and 2",
    layers=("attention", "mamba2", "dense"),
    understood=READ_BY_MAMBA2 | {_ATTENTION, "attention_bias", "mlp_bias"},
    unread=(
        SCANS_IN_CHUNKS,
        unread("How much of a head is rotated: half of it, whatever this says.", "attn_rotary_emb"),
        unread("Of training, and which logits a library returns.", "z_loss_coefficient num_logits_to_keep"),
    ),
    read=_read,
    weights=_weights,
    passed_over=passed_over,
    small=small_hybrid,
)
