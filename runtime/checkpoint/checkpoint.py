"""What a model's files are asked for, whatever their format is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.checkpoint.safetensors_header import SafetensorsTensor


class PackedTensor(Protocol):
    """A tensor that is stored in another form than its numbers have, as a file's header describes it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """How it is stored: a dtype, or a quantization in words."""

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes in the file."""

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError unless the tensor has this shape and is stored in a way that can be served."""

    def pieces(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """The numbers, a bounded piece at a time: which rows, and float32 [rows, columns], or [rows] of a vector."""


# A tensor as a file's header describes it: the library of safetensors reads the first kind, the second unpacks itself.
StoredTensor = SafetensorsTensor | PackedTensor


class Checkpoint(Protocol):
    """A model's files. They are in the words of the Hugging Face layout: keys are those of `config.json`, tensors are
    called as `transformers` calls them, and the tokenizer is what `tokenizer.json` would hold. Each method raises
    CheckpointError for what is missing or can't be read.
    """

    @property
    def path(self) -> Path: ...

    @property
    def has_tokenizer(self) -> bool: ...

    def config(self) -> Mapping[str, Any]:
        """What `config.json` holds."""

    def generation_config(self) -> Mapping[str, Any]:
        """What `generation_config.json` holds; nothing where there is none."""

    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor by name, as the headers of the files have them."""

    def tensor_in_file(self, name: str) -> str:
        """What the files call the tensor."""

    def tokenizer(self) -> str:
        """What `tokenizer.json` holds, as text."""

    def chat_templates(self) -> Mapping[str, str]:
        """The chat templates by their names; one that has no name is `default`."""

    def template_tokens(self) -> Mapping[str, str]:
        """Texts of special tokens by the names under which a chat template asks for them, such as eos_token."""
