"""The configuration of any model, from `config.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch

BY_LAYER: Final = ("windows", "rotates", "recurrent", "sparse", "pattern")  # fields with an entry for each layer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Fields of every model.

    An architecture adds fields in a subclass, which only its file reads.

    eos_token_ids: of config.json, generation_config.json and tokenizer_config.json together, ascending.
    dtype: the checkpoint's.
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


ConfigT = TypeVar("ConfigT", bound=ModelConfig)


def with_layers(config: ConfigT, kept: Sequence[int]) -> ConfigT:
    """Return the model with only these layers, by number, in this order."""
    changed: dict[str, Any] = {"num_layers": len(kept)}
    for name in BY_LAYER:
        if each := getattr(config, name, None):
            found = [each[number] for number in kept]
            changed[name] = "".join(found) if isinstance(each, str) else tuple(found)
    return replace(config, **changed)
