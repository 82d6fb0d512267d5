"""Read SmolLM3, a Llama in which some layers, by default every fourth, have no rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.architecture import Architecture, ModelWeights, TensorReader
from runahead.runtime.models.blocks.dense import (
    READ_BY_DENSE,
    DenseConfig,
    attention,
    dense_weights,
    feed_forward,
    read_dense,
    rope_of,
    window_size,
    window_switch,
    windows_by_type,
)
from runahead.runtime.models.config.keys import unread
from runahead.runtime.models.config.rope_values import rope
from runahead.runtime.models.config.values import number

_NAME: Final = "SmolLM3ForCausalLM"
_EVERY: Final = "no_rope_layer_interval"
_ROTATED, _STILL = 0, 1  # indexes of the model's ropes


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLM3Config(DenseConfig):
    """SmolLM3's fields. rotates: by layer, whether it rotates queries and keys."""

    rotates: tuple[bool, ...]


def _rotates(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Return by layer whether it rotates, from `no_rope_layers` (1: it rotates); or all but every
    `no_rope_layer_interval`-th.
    """
    every, named = number(raw, _EVERY, int, 4), raw.get("no_rope_layers")
    if named is None:
        return tuple((layer + 1) % every != 0 for layer in range(layers))
    if not isinstance(named, list) or len(named) != layers or any(one not in (0, 1) for one in named):
        raise CheckpointError(f"no_rope_layers is {named!r}; it must be 0 or 1 for each of {layers} layers")
    return tuple(map(bool, named))


def _windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Return windows if they are switched on, from `layer_types`, or on the layers without rotation."""
    window = window_size(raw.get("sliding_window")) if window_switch(raw) else 0
    named = windows_by_type(raw, architecture, layers, window)
    return tuple(0 if rotates else window for rotates in _rotates(raw, layers)) if named is None else named


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> SmolLM3Config:
    return read_dense(
        SmolLM3Config, raw, eos_token_ids, architecture=_NAME, kv_heads=4, positions=32768, windows=_windows,
        tied=True, rope=partial(rope, theta=2e6), flags=("attention_bias", "mlp_bias"),
        rotates=_rotates(raw, number(raw, "num_hidden_layers", int)),
    )  # fmt: skip


def _layer(config: SmolLM3Config, number: int, tensors: TensorReader) -> Layer:
    which = _ROTATED if config.rotates[number] else _STILL
    return Layer(attention(config, number, tensors, rope=which), feed_forward(config, number, tensors))


def _weights(config: SmolLM3Config, tensors: TensorReader) -> ModelWeights:
    rotates = rope_of(config)
    return dense_weights(config, tensors, _layer, rotates, replace(rotates, rotated=0))


SMOLLM3: Final = Architecture(
    name=_NAME,
    model_type="smollm3",
    models="SmolLM3",
    layers=("attention", "window", "dense"),
    understood=READ_BY_DENSE | {"no_rope_layers", _EVERY, "attention_bias", "mlp_bias"},
    unread=(unread("From which layer on a window holds: `layer_types` says it of each.", "max_window_layers"),),
    read=_read,
    weights=_weights,
)
