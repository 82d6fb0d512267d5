"""How single values of `config.json` are read: shared by the files of the architectures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import torch

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.models.config_keys import ROPE_UNDERSTOOD, ROPE_UNREAD
from runahead.runtime.models.rope import RopeScaling

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_T = TypeVar("_T", int, float, bool)


def common(
    raw: Mapping[str, Any], eos_token_ids: tuple[int, ...], *, architecture: str, positions: int
) -> dict[str, Any]:
    """The fields of `ModelConfig`, by name. positions: where the file does not say how many there are.

    Raises CheckpointError.
    """
    bos = token_ids(raw, "bos_token_id")
    return {
        "architecture": architecture,
        "vocab_size": number(raw, "vocab_size", int),
        "hidden_size": number(raw, "hidden_size", int),
        "num_layers": number(raw, "num_hidden_layers", int),
        "max_position_embeddings": number(raw, "max_position_embeddings", int, positions),
        "tie_word_embeddings": flag(raw, "tie_word_embeddings"),
        "eos_token_ids": eos_token_ids,
        "bos_token_id": bos[0] if bos else None,
        "dtype": dtype(raw),
    }


def rope(raw: Mapping[str, Any], positions: int) -> tuple[float, RopeScaling]:
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
    theta = number(rope if rope.get("rope_theta") is not None else raw, "rope_theta", float, 10000.0)
    if kind == "default":
        return theta, RopeScaling()
    factor = number(rope, "factor", float)
    if kind == "linear":
        return theta, RopeScaling(kind, factor)
    # Beside the object it wins, as in transformers.
    original = raw if raw.get("original_max_position_embeddings") is not None else rope
    return theta, RopeScaling(
        kind,
        factor,
        number(rope, "low_freq_factor", float),
        number(rope, "high_freq_factor", float),
        number(original, "original_max_position_embeddings", int, positions),
    )


def dtype(raw: Mapping[str, Any]) -> torch.dtype:
    key = "dtype" if raw.get("dtype") is not None else "torch_dtype"
    name = raw.get(key)
    name = "float32" if name is None else name
    if name not in tuple(_DTYPES):
        raise CheckpointError(f"{key} is {name!r}; supported are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def number(raw: Mapping[str, Any], key: str, kind: type[_T], default: _T | None = None, low: int = 1) -> _T:
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


def flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{key} is {value!r}; it must be true or false")
    return bool(value)


def token_ids(raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = raw.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise CheckpointError(f"{key} is {value!r}; it must be a token id or a list of them")
    return tuple(ids)
