"""The ids that a checkpoint's tokenizer has, without the tokenizer's library."""

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
    """One more than the highest id of the tokenizer; 0 where there is no tokenizer, or none of a known form.

    Raises CheckpointError for files that can't be read.
    """
    if not checkpoint.has_tokenizer:
        return 0
    try:
        tokenizer = msgspec.json.decode(checkpoint.tokenizer(), type=_Tokenizer)
    except msgspec.DecodeError:  # who loads the tokenizer says what is wrong with it
        return 0
    vocab = tokenizer.model.vocab
    end = max(vocab.values(), default=-1) + 1 if isinstance(vocab, dict) else len(vocab)
    return max(end, *(token.id + 1 for token in tokenizer.added_tokens), 0)
