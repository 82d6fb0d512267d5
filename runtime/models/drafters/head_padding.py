"""Rows of a draft head's tensors beyond the vocabulary: trainers fill embeddings and matrices up to a round number.

A head is trained with the vocabulary that its framework gave the target, which is often rounded up to a multiple of 64,
128, 256 or 512, as products like it. The rows beyond are of no token, and are left out where a head is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.checkpoint import Checkpoint, CheckpointError, StoredTensor
from runahead.runtime.checkpoint.safetensors_header import SafetensorsTensor
from runahead.runtime.models.drafters.torch_file import TorchTensor
from runahead.runtime.models.token_texts import token_texts
from runahead.runtime.models.weights import read_safetensors, rows_of
from runahead.runtime.rounding import ceil_div

MULTIPLES: Final = (64, 128, 256, 512)  # that vocabularies are filled up to


def is_padded(rows: int, tokens: int) -> bool:
    """Whether so many rows are those of so many tokens and padding, if any."""
    return rows == tokens or rows in {ceil_div(tokens, multiple) * multiple for multiple in MULTIPLES}


@dataclass(frozen=True, slots=True)
class FirstRows:
    """A `StoredTensor` without its last rows. whole: as it is stored. rows: that are read, at least 1."""

    whole: StoredTensor
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.whole.shape[1:])

    @property
    def dtype(self) -> str:
        return self.whole.dtype

    @property
    def size_bytes(self) -> int:
        return self.whole.size_bytes

    def check(self, shape: tuple[int, ...]) -> None:
        self.whole.check((self.whole.shape[0], *shape[1:]))

    def pieces(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        for rows, numbers in rows_of(self.whole, range(self.rows)):
            yield rows, numbers.numpy()


def without_padding(stored: StoredTensor, tokens: int) -> StoredTensor:
    """Its rows of tokens, where it has these and padding; itself else."""
    rows = stored.shape[0] if stored.shape else 0
    return FirstRows(stored, tokens) if rows != tokens and is_padded(rows, tokens) else stored


def whole_tensor(stored: StoredTensor) -> torch.Tensor | None:
    """In the dtype it is stored in, for tensors that are small. None of one that is packed. Raises CheckpointError."""
    if isinstance(stored, SafetensorsTensor):
        return read_safetensors(stored)
    return stored.tensor if isinstance(stored, TorchTensor) else None


def check_tokens_end(called: str, checkpoint: Checkpoint, in_draft: StoredTensor | None, tokens: int) -> None:
    """Raises CheckpointError if a head knows tokens beyond so many, where it says which it knows: in its tokenizer, or
    by tensor t2d, which says of each of its rows whether the draft vocabulary has it. called: what messages call it."""
    if checkpoint.has_tokenizer and (beyond := [number for number in token_texts(checkpoint) if number >= tokens]):
        raise CheckpointError(
            f"{called}: its tokenizer knows token {min(beyond)}, and the model has {tokens} tokens: it was made for "
            "another model"
        )
    if in_draft is not None and in_draft.shape[:1] > (tokens,):
        named = whole_tensor(in_draft)
        beyond = [] if named is None else (torch.nonzero(named.flatten()[tokens:]).flatten() + tokens).tolist()
        if beyond:
            raise CheckpointError(
                f"{called}: tensor t2d has token {beyond[0]} in the draft vocabulary, and the model has {tokens} "
                "tokens: it was made for another model"
            )
