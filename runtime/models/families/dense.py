"""Dense decoders of Llama's layers. Llama, Qwen2 and Qwen3, Mistral, OLMo 2 and Phi-3 differ only in values. In SmolLM3
some layers, by default every fourth, have no rotary embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.architecture import Architecture, ModelWeights, TensorReader
from runahead.runtime.models.blocks.dense import (
    READ_BY_DENSE,
    DenseConfig,
    Windows,
    attention,
    dense_weights,
    feed_forward,
    no_windows,
    numbered_windows,
    one_window,
    read_dense,
    rope_of,
    switched_windows,
    window_size,
    window_switch,
    windows_by_type,
)
from runahead.runtime.models.blocks.partial_rope import rotary_fraction_of
from runahead.runtime.models.config.keys import BIASES_AS_THEY_ARE, Unread, unread
from runahead.runtime.models.config.rope_values import rope, rope_object, rope_scaling
from runahead.runtime.models.config.values import number, refuse_other_code
from runahead.runtime.models.rope import RopeScaling

_NOTHING: Final[Mapping[str, Any]] = {}
_read: Final = partial(read_dense, DenseConfig)


def _layers_of(mixer: Mapping[str, Any], mlp: Mapping[str, Any]) -> Callable[[DenseConfig, int, TensorReader], Layer]:
    def made(config: DenseConfig, layer: int, tensors: TensorReader) -> Layer:
        return Layer(attention(config, layer, tensors, **mixer), feed_forward(config, layer, tensors, **mlp))

    return made


def _dense(
    name: str,
    model_type: str,
    models: str,
    *,
    windows: Windows,
    kv_heads: int | None,
    positions: int,
    flags: tuple[str, ...] = (),
    more_keys: tuple[str, ...] = (),
    unread: tuple[Unread, ...] = (),
    mixer: Mapping[str, Any] = _NOTHING,
    mlp: Mapping[str, Any] = _NOTHING,
    reader: Callable[..., DenseConfig] = _read,
    **read: Any,
) -> Architecture[DenseConfig]:
    """Make a line of the registry. flags, read: arguments of `read_dense`, which `reader` calls. more_keys: keys of
    `config.json` that are understood besides. mixer, mlp: arguments of `attention` and `feed_forward`.
    """
    return Architecture(
        name=name,
        model_type=model_type,
        models=models,
        layers=("attention", "dense") if windows is no_windows else ("attention", "window", "dense"),
        understood=READ_BY_DENSE.union(flags, more_keys),
        unread=unread,
        read=partial(
            reader, architecture=name, kv_heads=kv_heads, positions=positions, windows=windows,
            flags=flags, **read,
        ),
        weights=partial(dense_weights, layer=_layers_of(mixer, mlp)),
    )  # fmt: skip


_NO_BIAS: Final = unread(BIASES_AS_THEY_ARE, "attention_bias mlp_bias")
_mistral = partial(_dense, kv_heads=8, positions=131072, windows=numbered_windows, unread=(_NO_BIAS,))
_qwen = partial(
    _dense, kv_heads=32, positions=32768, windows=switched_windows, more_keys=("max_window_layers",)
)  # fmt: skip

LLAMA: Final = _dense(
    "LlamaForCausalLM",
    "llama",
    "Llama 1 to 3.3, SmolLM2, TinyLlama, Falcon 3, DeepSeek's distillations, and others of its shape",
    windows=no_windows,
    kv_heads=None,
    positions=2048,
    flags=("attention_bias", "mlp_bias"),
    unread=(unread("From which layer on a window holds: every layer attends to all tokens.", "max_window_layers"),),
)
QWEN2: Final = _qwen(
    "Qwen2ForCausalLM",
    "qwen2",
    "Qwen2, Qwen2.5 and DeepSeek's distillations",
    unread=(_NO_BIAS,),
    mixer={"qkv_bias": True},
)
QWEN3: Final = _qwen(
    "Qwen3ForCausalLM",
    "qwen3",
    "Qwen3 without experts",
    head_dim=128,
    flags=("attention_bias",),
    unread=(unread(BIASES_AS_THEY_ARE, "mlp_bias"),),
    mixer={"head_norms": True},
)
MISTRAL: Final = _mistral("MistralForCausalLM", "mistral", "Mistral 7B, Mistral Nemo, and others of its shape")
# A Mistral whose file lists the layers with a window.
MINISTRAL: Final = _mistral("MinistralForCausalLM", "ministral", "Ministral 8B, where its layers are named")
# Its norms follow attention and feed-forward; norms of queries and keys span all heads of a token.
OLMO2: Final = _dense(
    "Olmo2ForCausalLM",
    "olmo2",
    "OLMo 2",
    windows=no_windows,
    kv_heads=None,
    positions=2048,
    eps=1e-5,
    flags=("attention_bias",),
    mixer={
        "head_norms": True, "norms_span_heads": True, "norm": None, "post_norm": "post_attention_layernorm",
    },
    mlp={"norm": None, "post_norm": "post_feedforward_layernorm"},
)  # fmt: skip


# ------------------------------------------------------------ Phi-3

_PHI3: Final = "Phi3ForCausalLM"
_ORIGINAL: Final = "original_max_position_embeddings"
# Code that checkpoints name, which is not run: transformers has it under the same names.
_PHI3_CODE: Final = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": f"modeling_phi3.{_PHI3}"}


def _rope_phi3(raw: Mapping[str, Any], positions: int) -> tuple[float, RopeScaling]:
    """Read the rope. Longrope has two older names. Its original length is beside the object, or 4096."""
    key, found = rope_object(raw)
    names = {name: "longrope" for name in ("type", "rope_type") if found.get(name) in ("su", "yarn")}
    original = number(raw, _ORIGINAL, int, 4096)
    theta = number(found if found.get("rope_theta") is not None else raw, "rope_theta", float, 10000.0)
    scaling = rope_scaling(key, {**found, **names, _ORIGINAL: original}, positions)
    if scaling.kind not in ("default", "longrope"):
        raise CheckpointError(f"{key} has rope_type {scaling.kind!r}; {_PHI3} has default or longrope")
    return theta, scaling


def _read_phi3(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...], **values: Any) -> DenseConfig:
    refuse_other_code(raw, _PHI3_CODE)
    return _read(raw, eos_token_ids, rope=_rope_phi3, rotary_fraction=rotary_fraction_of(raw), **values)


PHI3: Final = replace(
    _dense(
        _PHI3,
        "phi3",
        "Phi-3, Phi-3.5 and Phi-4, mini and 14B",
        windows=one_window,
        kv_heads=None,
        positions=4096,
        eps=1e-5,
        unread=(_NO_BIAS, unread("Of training: nothing is dropped at inference.", "resid_pdrop embd_pdrop")),
        mixer={"projections": ("qkv_proj",)},
        mlp={"projections": ("gate_up_proj",)},
        reader=_read_phi3,
    ),
    understood=READ_BY_DENSE - {"use_sliding_window", "layer_types"} | {"auto_map"},
)


# ------------------------------------------------------------ SmolLM3

_SMOLLM3: Final = "SmolLM3ForCausalLM"
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


def _smollm3_windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Return windows if they are switched on, from `layer_types`, or on the layers without rotation."""
    window = window_size(raw.get("sliding_window")) if window_switch(raw) else 0
    named = windows_by_type(raw, architecture, layers, window)
    return tuple(0 if rotates else window for rotates in _rotates(raw, layers)) if named is None else named


def _read_smollm3(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> SmolLM3Config:
    return read_dense(
        SmolLM3Config, raw, eos_token_ids, architecture=_SMOLLM3, kv_heads=4, positions=32768, windows=_smollm3_windows,
        tied=True, rope=partial(rope, theta=2e6), flags=("attention_bias", "mlp_bias"),
        rotates=_rotates(raw, number(raw, "num_hidden_layers", int)),
    )  # fmt: skip


def _smollm3_layer(config: SmolLM3Config, layer: int, tensors: TensorReader) -> Layer:
    which = _ROTATED if config.rotates[layer] else _STILL
    return Layer(attention(config, layer, tensors, rope=which), feed_forward(config, layer, tensors))


def _smollm3_weights(config: SmolLM3Config, tensors: TensorReader) -> ModelWeights:
    rotates = rope_of(config)
    return dense_weights(config, tensors, _smollm3_layer, rotates, replace(rotates, rotated=0))


SMOLLM3: Final = Architecture(
    name=_SMOLLM3,
    model_type="smollm3",
    models="SmolLM3",
    layers=("attention", "window", "dense"),
    understood=READ_BY_DENSE | {"no_rope_layers", _EVERY, "attention_bias", "mlp_bias"},
    unread=(unread("From which layer on a window holds: `layer_types` says it of each.", "max_window_layers"),),
    read=_read_smollm3,
    weights=_smollm3_weights,
)
