"""`config.json` of a checkpoint in the Hugging Face layout, read into what a dense decoder needs to know."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from runahead.runtime.checkpoint import CONFIG, GENERATION_CONFIG, CheckpointError
from runahead.runtime.models.config_keys import (
    LEFT_OUT,
    LLAMA,
    MISTRAL,
    MODEL_TYPES,
    NEUTRAL,
    QWEN2,
    QWEN3,
    ROPE_UNDERSTOOD,
    ROPE_UNREAD,
    UNDERSTOOD,
    UNREAD,
    UNREAD_BY,
)

ARCHITECTURES = tuple(MODEL_TYPES)
_KV_HEADS = "num_key_value_heads"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_T = TypeVar("_T", int, float, bool)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    kind: default, linear or llama3. factor: linear and llama3. The other three: llama3 alone.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder's shape.

    windows: by layer, how many tokens a token attends to; 0 is all before it.
    eos_token_ids: of config.json and generation_config.json together, ascending.
    dtype: the dtype the checkpoint says it is in.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    windows: tuple[int, ...]
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: torch.dtype


def load_config(folder: Path) -> ModelConfig:
    """Read `config.json`, and `generation_config.json` where there is one.

    Raises CheckpointError for a file that is missing or no JSON object, and for a value that is not supported.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} is no checkpoint: it has no {CONFIG}")
    raw = _read_object(path)
    generation = folder / GENERATION_CONFIG
    eos = set(_token_ids(raw, "eos_token_id"))
    if generation.is_file():
        eos |= set(_token_ids(_read_object(generation), "eos_token_id"))
    return parse_config(raw, tuple(sorted(eos)))


def parse_config(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """`raw` is what config.json holds.

    Raises CheckpointError naming the key and the value it can't take, or a key that is neither understood nor known to
    change no number.
    """
    architecture = _architecture(raw)
    _refuse_what_would_change_the_model(raw)
    _refuse_other_keys(raw, architecture)
    hidden, heads = _number(raw, "hidden_size", int), _number(raw, "num_attention_heads", int)
    left_out = LEFT_OUT[architecture]
    kv_heads = _number({_KV_HEADS: raw.get(_KV_HEADS, left_out.kv_heads)}, _KV_HEADS, int, heads)
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    head_dim = _number(raw, "head_dim", int, 128 if architecture == QWEN3 else hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"head_dim must be even, and is {head_dim}")
    layers = _number(raw, "num_hidden_layers", int)
    positions = _number(raw, "max_position_embeddings", int, left_out.positions)
    theta, scaling = _rope(raw, positions)
    bias = architecture in (LLAMA, QWEN3) and _flag(raw, "attention_bias")
    bos = _token_ids(raw, "bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_number(raw, "vocab_size", int),
        hidden_size=hidden,
        intermediate_size=_number(raw, "intermediate_size", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(raw, "rms_norm_eps", float, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        windows=_windows(raw, architecture, layers),
        max_position_embeddings=positions,
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        qkv_bias=bias or architecture == QWEN2,
        output_bias=bias,
        mlp_bias=architecture == LLAMA and _flag(raw, "mlp_bias"),
        qk_norm=architecture == QWEN3,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos[0] if bos else None,
        dtype=_dtype(raw),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return raw


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise CheckpointError(f"architectures is {names!r}; supported are {', '.join(ARCHITECTURES)}")
    name = str(names[0])
    if raw.get("model_type", MODEL_TYPES[name]) != MODEL_TYPES[name]:
        raise CheckpointError(f"model_type is {raw['model_type']!r}; that of {name} is {MODEL_TYPES[name]!r}")
    return name


def _refuse_what_would_change_the_model(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act is {raw['hidden_act']!r}; only 'silu' is supported")
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"]
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        raise CheckpointError(f"quantization_config is {method!r}; only unquantized checkpoints are supported")
    for source in (raw, raw.get("rope_parameters"), raw.get("rope_scaling")):
        if isinstance(source, dict) and source.get("partial_rotary_factor", 1.0) not in (1, None):
            raise CheckpointError(f"partial_rotary_factor is {source['partial_rotary_factor']!r}; only 1 is supported")


def _refuse_other_keys(raw: Mapping[str, Any], architecture: str) -> None:
    """What `runahead.runtime.models.config_keys` does not list for the architecture, by name."""
    neutral = {key: (values, group.what) for group in NEUTRAL for key, values in group.values.items()}
    known = UNDERSTOOD[architecture].union(*(group.keys for group in (*UNREAD, *UNREAD_BY[architecture])))
    for key in raw.keys() & neutral.keys():
        values, what = neutral[key]
        if raw[key] not in values:
            only = " or ".join(json.dumps(value) for value in values)
            raise CheckpointError(f"{key} is {raw[key]!r}, which {what}; only {only} is supported")
    if unknown := sorted(raw.keys() - known - neutral.keys()):
        raise CheckpointError(
            f"config.json has keys that are not understood for {architecture} and may change what the model computes: "
            f"{', '.join(unknown)}; a key that is known to change nothing can be taken out of the file"
        )


def _rope(raw: Mapping[str, Any], positions: int) -> tuple[float, RopeScaling]:
    """Theta and scaling, from the older `rope_theta` and `rope_scaling` or from `rope_parameters`."""
    key = "rope_parameters" if raw.get("rope_scaling") in (None, {}) else "rope_scaling"
    rope = raw.get(key)
    rope = {} if rope is None else rope
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"{key} is {rope!r}; one flat object for all layers is supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_UNDERSTOOD:
        raise CheckpointError(f"{key} has rope_type {kind!r}; supported are {', '.join(ROPE_UNDERSTOOD)}")
    if rope.get("type", kind) != kind:
        raise CheckpointError(f"{key} has rope_type {kind!r} and type {rope['type']!r}; the two must be the same")
    if unknown := sorted(rope.keys() - ROPE_UNDERSTOOD[kind] - ROPE_UNREAD.keys):
        raise CheckpointError(f"{key} has keys that are not understood for rope_type {kind!r}: {', '.join(unknown)}")
    theta = _number(rope if rope.get("rope_theta") is not None else raw, "rope_theta", float, 10000.0)
    if kind == "default":
        return theta, RopeScaling()
    factor = _number(rope, "factor", float)
    if kind == "linear":
        return theta, RopeScaling(kind, factor)
    # Beside the object it wins, as in transformers.
    original = raw if raw.get("original_max_position_embeddings") is not None else rope
    return theta, RopeScaling(
        kind,
        factor,
        _number(rope, "low_freq_factor", float),
        _number(rope, "high_freq_factor", float),
        _number(original, "original_max_position_embeddings", int, positions),
    )


def _windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """By layer, as `layer_types` says, or else as the architecture's own switches do."""
    window = _window(raw, architecture)
    kinds = raw.get("layer_types")
    if kinds is not None:
        known = {"full_attention": 0, "sliding_attention": window}
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in tuple(known) for kind in kinds):
            raise CheckpointError(
                f"layer_types is {kinds!r}; it must name {' or '.join(known)} for each of {layers} layers"
            )
        if not window and "sliding_attention" in kinds:
            raise CheckpointError(
                f"layer_types has sliding_attention, and {architecture} has no sliding window here: sliding_window is "
                f"{raw.get('sliding_window')!r}, use_sliding_window {raw.get('use_sliding_window')!r}"
            )
        return tuple(known[kind] for kind in kinds)
    if architecture == MISTRAL or not window:
        return (window,) * layers
    first = _number(raw, "max_window_layers", int, 28, low=0)
    return tuple(window if layer >= first else 0 for layer in range(layers))


def _window(raw: Mapping[str, Any], architecture: str) -> int:
    """How many tokens a layer with a window attends to; 0 if there is no window."""
    switch = None if raw.get("use_sliding_window") is None else _flag(raw, "use_sliding_window")
    given = raw.get("sliding_window", LEFT_OUT[architecture].window)
    if architecture == LLAMA and (given is not None or switch):
        name = "use_sliding_window" if given is None else "sliding_window"
        raise CheckpointError(f"{name} is {raw[name]!r}, and {LLAMA} attends to all tokens; only null is supported")
    if given is None or (architecture in (QWEN2, QWEN3) and not switch):
        window = 0
    else:
        window = _number({"sliding_window": given}, "sliding_window", int)
    if architecture == MISTRAL and switch is not None and switch != bool(window):
        raise CheckpointError(
            f"use_sliding_window is {switch} and sliding_window {given!r}, a contradiction: {MISTRAL} has a window if "
            "sliding_window is a number"
        )
    return window


def _dtype(raw: Mapping[str, Any]) -> torch.dtype:
    key = "dtype" if raw.get("dtype") is not None else "torch_dtype"
    name = raw.get(key)
    name = "float32" if name is None else name
    if name not in tuple(_DTYPES):
        raise CheckpointError(f"{key} is {name!r}; supported are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _number(raw: Mapping[str, Any], key: str, kind: type[_T], default: _T | None = None, low: int = 1) -> _T:
    """A finite number of at least `low`, or above 0 for a float; null and absent take the default."""
    value = raw.get(key)
    if value is None:
        if default is None:
            raise CheckpointError(f"config.json has no {key}")
        return default
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or (kind is int and (value != int(value) or value < low)) or (kind is float and value <= 0):
        what = f"an integer of at least {low}" if kind is int else "a number above 0"
        raise CheckpointError(f"{key} is {value!r}; it must be {what}")
    return kind(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{key} is {value!r}; it must be true or false")
    return bool(value)


def _token_ids(raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = raw.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise CheckpointError(f"{key} is {value!r}; it must be a token id or a list of them")
    return tuple(ids)
