"""Reads the tensors of a draft head's `pytorch_model.bin`, the only file of this format that is read.

EAGLE-1 heads are published only in it. The archive is checked first (`runahead.runtime.checkpoint.torch_archive`);
torch's restricted reader then makes only tensors and containers, and the tensors stay in the file until each was found
to fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.checkpoint.refusals import AGAIN
from runahead.runtime.checkpoint.torch_archive import MOST_AROUND, check_archive

_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
_WITH_INTEGERS: Final = (*_FLOATS, torch.int64, torch.int32, torch.bool)
_NUMBERS_AT_ONCE: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A `StoredTensor` of such a file. tensor: on the CPU, in the file's memory map."""

    name: str
    path: Path
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize

    def check(self, shape: tuple[int, ...]) -> None:
        """Check the tensor's shape and dtype. Raises CheckpointError."""
        if self.tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"tensor {self.name} of {self.path} is of {self.tensor.dtype}; supported are "
                f"{', '.join(map(str, _FLOATS))}"
            )
        if self.shape != shape:
            raise CheckpointError(
                f"tensor {self.name} of {self.path} has shape {list(self.shape)}; config.json asks for {list(shape)}"
            )

    def pieces(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        rows = len(self.tensor)
        step = max(1, _NUMBERS_AT_ONCE // max(1, math.prod(self.shape[1:])))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            yield slice(begin, end), self.tensor[begin:end].float().contiguous().numpy()


def read_torch_file(path: Path, most: int) -> dict[str, TorchTensor]:
    """Return the file's tensors by name. most: bound of the head's tensors in bytes, from its configuration.

    Raises CheckpointError for a file larger than that plus `MOST_AROUND`, which is not opened; for what `check_archive`
    refuses; and for an unreadable file or other objects.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    if size > most + MOST_AROUND:
        raise CheckpointError(
            f"{path} has {size} bytes, and the tensors of a head as its config.json describes it take at most {most}: "
            "it holds something else, and was not opened"
        )
    check_archive(path)
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # any error of a damaged file: none of it is used
        # torch's message recommends to read the file without restrictions.
        raise CheckpointError(f"{path} can't be read as tensors ({type(error).__name__}); {AGAIN}") from None
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} holds no dictionary of tensors, but an object of {type(loaded).__name__}")
    return {_name(path, name): _tensor(path, name, value) for name, value in loaded.items()}


def _name(path: Path, name: object) -> str:
    if not isinstance(name, str):
        raise CheckpointError(f"{path} calls a tensor {name!r}; a name must be a text")
    return name


def _tensor(path: Path, name: str, value: object) -> TorchTensor:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(f"{path} holds {name}, an object of {type(value).__name__}; tensors alone are read")
    assert isinstance(value, torch.Tensor)
    of_others = value.layout is not torch.strided or value.device.type != "cpu" or value.is_neg()
    if of_others or value.dtype not in _WITH_INTEGERS:
        raise CheckpointError(
            f"{path} holds {name}, a tensor of {value.dtype}, {value.layout}, on {value.device}; ordinary ones of "
            f"{', '.join(map(str, _WITH_INTEGERS))} are read"
        )
    return TorchTensor(name, path, value.detach())
