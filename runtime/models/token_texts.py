"""Reads the texts of a checkpoint's tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from runahead.runtime.checkpoint import Checkpoint, CheckpointError


def token_texts(checkpoint: Checkpoint) -> dict[int, str]:
    """Return token texts by id, of a checkpoint with a tokenizer. Raises CheckpointError if it can't be read."""
    try:
        told = json.loads(checkpoint.tokenizer())
        vocabulary: Any = told["model"]["vocab"]
        if isinstance(vocabulary, Mapping):
            texts = {int(number): str(text) for text, number in vocabulary.items()}
        else:  # of a unigram model: pairs of text and score
            texts = {number: str(pair[0]) for number, pair in enumerate(vocabulary)}
        return texts | {int(added["id"]): str(added["content"]) for added in told.get("added_tokens") or ()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.path} has no vocabulary that can be read: {error!r}"
        ) from error


class _Added(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    """The parts of `tokenizer.json` that are read: making objects of a whole vocabulary is slow."""

    added_tokens: list[_Added] = []


def end_of_tokenizer(checkpoint: Checkpoint) -> int | None:
    """Return the id of the tokenizer configuration's end-of-sequence token; None if it names none or no added token.
    Raises CheckpointError for an unreadable configuration.
    """
    text = checkpoint.template_tokens().get("eos_token") if checkpoint.has_tokenizer else None
    if text is None:
        return None
    try:
        added = msgspec.json.decode(checkpoint.tokenizer(), type=_Tokenizer).added_tokens
    except (CheckpointError, msgspec.MsgspecError, RecursionError):
        return None  # the reader of the whole file reports the error
    return next((token.id for token in added if token.content == text and token.id >= 0), None)
