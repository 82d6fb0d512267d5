"""What the tokens of a checkpoint's own tokenizer stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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
