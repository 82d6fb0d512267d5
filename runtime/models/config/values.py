"""Reads single values of `config.json` for all architectures."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import torch

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.wire.setting import shown

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MOST: Final = (1 << 31) - 1  # of integers: sizes and ids have 32 bits
_MOST_LAYERS: Final = 10_000  # each is described before a file is read
_T = TypeVar("_T", int, float, bool)
_Kind = TypeVar("_Kind")


def common(
    raw: Mapping[str, Any],
    eos_token_ids: tuple[int, ...],
    *,
    architecture: str,
    positions: int,
    vocab: int | None = None,
    tied: bool,
) -> dict[str, Any]:
    """Return the fields of `ModelConfig` by name. positions, vocab, tied: defaults for the number of positions, the
    vocabulary and whether the head is the embedding; vocab: None: required.

    Raises CheckpointError.
    """
    bos, layers = token_ids(raw, "bos_token_id"), number(raw, "num_hidden_layers", int)
    if layers > _MOST_LAYERS:
        raise CheckpointError(f"num_hidden_layers is {layers}; at most {_MOST_LAYERS} are supported")
    return {
        "architecture": architecture,
        "vocab_size": number(raw, "vocab_size", int, vocab),
        "hidden_size": number(raw, "hidden_size", int),
        "num_layers": layers,
        "max_position_embeddings": number(raw, "max_position_embeddings", int, positions),
        "tie_word_embeddings": flag(raw, "tie_word_embeddings", default=tied),
        "eos_token_ids": eos_token_ids,
        "bos_token_id": bos[0] if bos else None,
        "dtype": dtype(raw),
    }


def dtype(raw: Mapping[str, Any]) -> torch.dtype:
    key = "dtype" if raw.get("dtype") is not None else "torch_dtype"
    name = raw.get(key)
    name = "float32" if name is None else name
    if name not in tuple(_DTYPES):
        raise CheckpointError(f"{key} is {name!r}; supported are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def number(raw: Mapping[str, Any], key: str, kind: type[_T], default: _T | None = None, low: int = 1) -> _T:
    """Read a finite number: an integer from `low` to 2147483647, or a float above 0. Null and absent give the default.

    Raises CheckpointError.
    """
    value = raw.get(key)
    if value is None:
        if default is None:
            raise CheckpointError(f"config.json has no {key}")
        return default
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not fits or (kind is int and (value != int(value) or value < low)) or (kind is float and value <= 0):
        what = f"an integer of at least {low}" if kind is int else "a number above 0"
        raise CheckpointError(f"{key} is {shown(value)}; it must be {what}")
    if kind is int and value > _MOST:
        raise CheckpointError(f"{key} is {shown(value)}; it must be at most {_MOST}")
    return kind(value)


def flag(raw: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Read a flag. default: for an absent key; null is false."""
    value = raw.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{key} is {value!r}; it must be true or false")
    return bool(value)


def refuse_other_code(raw: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Raise CheckpointError if `auto_map` names other code than `known`, by key. None is ever run: an architecture's
    file computes what the known code does."""
    named = raw.get("auto_map") or {}
    for key, code in named.items() if isinstance(named, dict) else [("", named)]:
        if not isinstance(code, str) or code.split("--")[-1] != known.get(key):
            raise CheckpointError(f"auto_map names {code!r}, code of the checkpoint's own, which is never run")


def by_layer(raw: Mapping[str, Any], layers: int, known: Mapping[str, _Kind]) -> tuple[_Kind, ...] | None:
    """Return `known` of each layer's kind in `layer_types`; None if the file lacks it. Raises CheckpointError."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in tuple(known) for kind in kinds):
        raise CheckpointError(
            f"layer_types is {kinds!r}; it must name {' or '.join(known)} for each of {layers} layers"
        )
    return tuple(known[kind] for kind in kinds)


def listed_layers(raw: Mapping[str, Any], key: str, layers: int) -> list[int]:
    """Return the layers that a key lists, none if the file lacks it. Raises CheckpointError."""
    found = raw.get(key)
    found = [] if found is None else found
    fits = isinstance(found, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in found)
    if not fits or any(not 0 <= one < layers for one in found):
        raise CheckpointError(f"{key} is {found!r}; it must be a list of layers, from 0 to {layers - 1}")
    return list(found)


def token_ids(raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = raw.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i <= _MOST for i in ids):
        raise CheckpointError(f"{key} is {shown(value)}; it must be a token id or a list of them")
    return tuple(ids)
