"""What the tokens of a checkpoint's own tokenizer stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from runahead.runtime.checkpoint import Checkpoint, CheckpointError


def token_texts(checkpoint: Checkpoint) -> dict[int, str]:
    """By number. The checkpoint has a tokenizer. Raises CheckpointError for one that can't be read."""
    try:
        told = json.loads(checkpoint.tokenizer())
        vocabulary: Any = told["model"]["vocab"]
        if isinstance(vocabulary, Mapping):
            texts = {int(number): str(text) for text, number in vocabulary.items()}
        else:  # of a unigram model: pairs of a text and its score
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
    """What is read of `tokenizer.json`: a vocabulary takes long to be made objects of."""

    added_tokens: list[_Added] = []


def end_of_tokenizer(checkpoint: Checkpoint) -> int | None:
    """The id of the token that the tokenizer's own configuration names as the end of a sequence; None where it names
    none, or none that is an added token. Raises CheckpointError for a configuration that can't be read."""
    text = checkpoint.template_tokens().get("eos_token") if checkpoint.has_tokenizer else None
    if text is None:
        return None
    try:
        added = msgspec.json.decode(checkpoint.tokenizer(), type=_Tokenizer).added_tokens
    except (CheckpointError, msgspec.MsgspecError, RecursionError):
        return None  # who reads the whole file says what is wrong with it
    return next((token.id for token in added if token.content == text and token.id >= 0), None)
