"""Finds the ids of a checkpoint's tokenizer without the library, and refuses one on which the library aborts."""

from __future__ import annotations

import msgspec

from runahead.runtime.checkpoint.checkpoint import Checkpoint
from runahead.runtime.checkpoint.errors import CheckpointError


class _Added(msgspec.Struct):
    id: int


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    merges: msgspec.Raw = msgspec.Raw(b"[]")  # decoded only if there is a prefix
    continuing_subword_prefix: str | None = None


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


def size_of_tokenizer(checkpoint: Checkpoint) -> int:
    """Return the tokenizer's highest id plus one; 0 without a tokenizer of a known form.

    Raises CheckpointError for unreadable files, and for a merge that lacks the prefix that the library cuts off.
    """
    if not checkpoint.has_tokenizer:
        return 0
    try:
        tokenizer = msgspec.json.decode(checkpoint.tokenizer(), type=_Tokenizer)
        bad = _merge_without_prefix(tokenizer.model)
    except msgspec.DecodeError:  # the loader of the tokenizer reports the error
        return 0
    if bad is not None:
        prefix = tokenizer.model.continuing_subword_prefix
        raise CheckpointError(
            f"the tokenizer of {checkpoint.path} can't be read: its continuing_subword_prefix is {prefix!r:.80}, and "
            f"{bad!r:.80} in its merges continues a word without it"
        )
    vocab = tokenizer.model.vocab
    end = max(vocab.values(), default=-1) + 1 if isinstance(vocab, dict) else len(vocab)
    return max(end, *(token.id + 1 for token in tokenizer.added_tokens), 0)


def _merge_without_prefix(model: _Model) -> str | None:
    """Return the second part of such a merge, None if there is none."""
    prefix = model.continuing_subword_prefix
    if not prefix:
        return None
    merges = msgspec.json.decode(model.merges, type=list[str | tuple[str, str]])
    seconds = (merge.partition(" ")[2] if isinstance(merge, str) else merge[1] for merge in merges)
    return next((second for second in seconds if not second.startswith(prefix)), None)
