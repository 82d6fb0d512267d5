"""What `config.json` says of any model."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What every model has, whatever its layers are.

    An architecture adds its own fields in a subclass, which its file alone reads: everybody else has a `ModelConfig`.

    eos_token_ids: of config.json, generation_config.json and tokenizer_config.json together, ascending.
    dtype: the dtype the checkpoint says it is in.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: torch.dtype
