"""Finds the ids of a checkpoint's tokenizer without the tokenizer library."""

from __future__ import annotations

import msgspec

from runahead.runtime.checkpoint.checkpoint import Checkpoint


class _Added(msgspec.Struct):
    id: int


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


def size_of_tokenizer(checkpoint: Checkpoint) -> int:
    """Return the tokenizer's highest id plus one; 0 without a tokenizer of a known form.

    Raises CheckpointError for unreadable files.
    """
    if not checkpoint.has_tokenizer:
        return 0
    try:
        tokenizer = msgspec.json.decode(checkpoint.tokenizer(), type=_Tokenizer)
    except msgspec.DecodeError:  # the loader of the tokenizer reports the error
        return 0
    vocab = tokenizer.model.vocab
    end = max(vocab.values(), default=-1) + 1 if isinstance(vocab, dict) else len(vocab)
    return max(end, *(token.id + 1 for token in tokenizer.added_tokens), 0)
