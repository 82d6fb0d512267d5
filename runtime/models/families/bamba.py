"""Bamba: Mamba-2 layers, and listed layers of attention with half of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.architecture import Architecture, TensorReader
from runahead.runtime.models.blocks.dense import (
    all_tokens,
    attention,
    dense_weights,
    feed_forward,
    read_dense,
)
from runahead.runtime.models.blocks.mamba2 import (
    READ_BY_MAMBA2,
    SCANS_IN_CHUNKS,
    Mamba2Config,
    mamba2,
    read_mamba2,
)
from runahead.runtime.models.blocks.partial_rope import rotary_fraction_of
from runahead.runtime.models.config.keys import unread
from runahead.runtime.models.config.rope_values import rope_of_a_part
from runahead.runtime.models.config.values import listed_layers, number

_NAME: Final = "BambaForCausalLM"
_ATTENTION: Final = "attn_layer_indices"
_ROTARY_FRACTION: Final = 0.5  # rotated part of a head, whatever the file says


def _recurrent(raw: Mapping[str, Any]) -> list[bool]:
    layers = number(raw, "num_hidden_layers", int)
    named = listed_layers(raw, _ATTENTION, layers)
    return [layer not in named for layer in range(layers)]


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> Mamba2Config:
    rotary_fraction = rotary_fraction_of(raw, _ROTARY_FRACTION)
    if rotary_fraction != _ROTARY_FRACTION:
        raise CheckpointError(f"partial_rotary_factor is {rotary_fraction!r}; {_NAME} has {_ROTARY_FRACTION}")
    return read_dense(
        Mamba2Config, raw, eos_token_ids, architecture=_NAME, kv_heads=8, positions=262144, windows=all_tokens,
        eps=1e-5, rope=rope_of_a_part, rotary_fraction=rotary_fraction, flags=("attention_bias", "mlp_bias"),
        **read_mamba2(raw, _recurrent(raw)),
    )  # fmt: skip


def _layer(config: Mamba2Config, number: int, tensors: TensorReader) -> Layer:
    mixer = (mamba2 if config.recurrent[number] else attention)(config, number, tensors)
    return Layer(mixer, feed_forward(config, number, tensors, block="feed_forward", norm="pre_ff_layernorm"))


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
    weights=partial(dense_weights, layer=_layer, final_norm="model.final_layernorm"),
)
