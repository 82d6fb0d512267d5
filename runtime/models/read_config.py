"""Reads a checkpoint's `config.json`, or its equivalent, with the reader of its architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from runahead.runtime.checkpoint import Checkpoint, CheckpointError
from runahead.runtime.checkpoint.folder import TEXT_CONFIG
from runahead.runtime.checkpoint.quantized.read_config import read_quantization
from runahead.runtime.models.architecture import Architecture, Whole
from runahead.runtime.models.config.keys import NEUTRAL, UNREAD
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.config.values import token_ids
from runahead.runtime.models.registry import ARCHITECTURES, NOT_SERVED
from runahead.runtime.models.token_texts import end_of_tokenizer

_OF_BOTH: Final = frozenset(  # in a multimodal model's file, beside the text's keys or among them
    "tie_word_embeddings dtype torch_dtype bos_token_id eos_token_id quantization_config".split()
)


def load_config(checkpoint: Checkpoint) -> ModelConfig:
    """Read `config.json`, and end tokens also from `generation_config.json` and `tokenizer_config.json`.

    Raises CheckpointError for a missing file, one that is no JSON object, and an unsupported value.
    """
    raw = _text_of(checkpoint.config())
    eos = {*token_ids(raw, "eos_token_id"), *token_ids(checkpoint.generation_config(), "eos_token_id")}
    config = parse_config(raw, tuple(sorted(eos)))
    own = end_of_tokenizer(checkpoint)
    if own is None or own in eos or own >= config.vocab_size:
        return config
    return replace(config, eos_token_ids=tuple(sorted({*eos, own})))


def parse_config(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Parse config.json's content.

    Raises CheckpointError naming an unsupported key and value, or a key that is neither read nor known to have no
    effect.
    """
    raw = _text_of(raw)
    architecture = _architecture(raw)
    read_quantization(raw)  # refuses unsupported ones; weights are dequantized when they are read
    _refuse_other_keys(raw, architecture)
    config: ModelConfig = architecture.read(raw, eos_token_ids)
    return config


def _text_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text's part of a multimodal model's file."""
    names = raw.get("architectures")
    wholes = [(found, found.whole) for found in ARCHITECTURES.values() if found.whole is not None]
    for found, whole in wholes:
        if names == [whole.name]:
            return _part(raw, found, whole)
    return raw


def _part(raw: Mapping[str, Any], text: Architecture[Any], whole: Whole) -> Mapping[str, Any]:
    """Return the text's part; keys that are also beside it must agree."""
    if raw.get("model_type", whole.model_type) != whole.model_type:
        raise CheckpointError(f"model_type is {raw['model_type']!r}; {whole.name} has {whole.model_type!r}")
    if not isinstance(raw.get(TEXT_CONFIG), dict):
        raise CheckpointError(
            f"{TEXT_CONFIG} is {raw.get(TEXT_CONFIG)!r}; in {whole.name} it must describe the text part"
        )
    known = _OF_BOTH.union(
        {"architectures", "model_type", TEXT_CONFIG}, *(each.keys for each in (*UNREAD, *whole.unread))
    )
    if unknown := sorted(raw.keys() - known):
        raise CheckpointError(
            f"config.json has keys that are not understood for {whole.name} and may change what the model computes: "
            f"{', '.join(unknown)}; a key that is known to change nothing can be taken out of the file"
        )
    found = {**raw[TEXT_CONFIG], "architectures": [text.name]}
    for key in sorted(_OF_BOTH & {key for key in raw if raw[key] is not None}):
        if found.get(key) not in (None, raw[key]):
            raise CheckpointError(
                f"{key} is {raw[key]!r}, and {found[key]!r} in {TEXT_CONFIG}: they contradict each other"
            )
        found[key] = raw[key]
    return found


def _architecture(raw: Mapping[str, Any]) -> Architecture[Any]:
    names = raw.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in tuple(NOT_SERVED):
        raise CheckpointError(
            f"architectures is {names!r}, which is not served: {NOT_SERVED[names[0]]}; supported are "
            f"{', '.join(ARCHITECTURES)}: serve a model of one of these"
        )
    if not isinstance(names, list) or len(names) != 1 or names[0] not in tuple(ARCHITECTURES):
        raise CheckpointError(
            f"architectures is {names!r}; supported are {', '.join(ARCHITECTURES)}: serve a model of one of these"
        )
    found = ARCHITECTURES[names[0]]
    if raw.get("model_type", found.model_type) != found.model_type:
        raise CheckpointError(f"model_type is {raw['model_type']!r}; {found.name} has {found.model_type!r}")
    return found


def _refuse_other_keys(raw: Mapping[str, Any], architecture: Architecture[Any]) -> None:
    """Refuse keys that neither `config/keys.py` nor the architecture's file lists."""
    neutral = {key: (values, group.what) for group in NEUTRAL for key, values in group.values.items()}
    neutral = {key: found for key, found in neutral.items() if key not in architecture.understood}
    known = architecture.understood.union(*(group.keys for group in (*UNREAD, *architecture.unread)))
    for key in raw.keys() & neutral.keys():
        values, what = neutral[key]
        if raw[key] not in values:
            only = " or ".join(json.dumps(value) for value in values)
            raise CheckpointError(f"{key} is {raw[key]!r}, which {what}; only {only} is supported")
    if unknown := sorted(raw.keys() - known - neutral.keys()):
        raise CheckpointError(
            f"config.json has keys that are not understood for {architecture.name} and may change what the model "
            f"computes: {', '.join(unknown)}; a key that is known to change nothing can be taken out of the file"
        )
