"""The interface of a model's files in either format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.checkpoint.safetensors_header import SafetensorsTensor


class PackedTensor(Protocol):
    """A tensor stored in another form than its numbers, described by a file's header."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """How it is stored: a dtype, or a quantization in words."""

    @property
    def size_bytes(self) -> int:
        """Its bytes in the file."""

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError unless the tensor has this shape and a supported form."""

    def pieces(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """Yield bounded pieces: which rows, and float32 [rows, columns], or [rows] of a vector."""


# A tensor described by a file's header: the safetensors library reads the first kind, the second unpacks itself.
StoredTensor = SafetensorsTensor | PackedTensor


class Checkpoint(Protocol):
    """A model's files in the terms of the Hugging Face layout: keys of `config.json`, tensor names of `transformers`,
    and the content of `tokenizer.json`. Each method raises CheckpointError for a missing or unreadable part.
    """

    @property
    def path(self) -> Path: ...

    @property
    def has_tokenizer(self) -> bool: ...

    def config(self) -> Mapping[str, Any]:
        """Return the content of `config.json`."""

    def generation_config(self) -> Mapping[str, Any]:
        """Return the content of `generation_config.json`, empty without one."""

    def tensors(self) -> Mapping[str, StoredTensor]:
        """Return every tensor by name, from the files' headers."""

    def tensor_in_file(self, name: str) -> str:
        """Return a tensor's name in the files."""

    def tokenizer(self) -> str:
        """Return the content of `tokenizer.json` as text."""

    def chat_templates(self) -> Mapping[str, str]:
        """Return chat templates by name; an unnamed one is `default`."""

    def template_tokens(self) -> Mapping[str, str]:
        """Return special tokens' texts by the names in chat templates, such as eos_token."""
