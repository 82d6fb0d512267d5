"""Tensors of a draft head's `pytorch_model.bin`: the one file of such a kind that anything here reads.

Heads of EAGLE-1 are published in no other form. What is in the file was looked at before
(`runahead.runtime.checkpoint.torch_archive`); it is read by torch's restricted reader, which makes tensors and
containers and calls nothing else, and its tensors stay in the file until each was found to fit.
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
    """A `StoredTensor` of such a file. tensor: on the CPU, in the file's own memory."""

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
        """Raises CheckpointError unless the tensor has this shape and a dtype that can be served."""
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
    """Its tensors, by name. most: bytes that those of the head take at most, by its configuration.

    Raises CheckpointError for a file that is larger than that with `MOST_AROUND` bytes more, which is not opened; for
    what `check_archive` refuses; and for one that can't be read, or holds something else than tensors.
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
    except Exception as error:  # whatever a damaged program makes of itself: nothing of it is used
        # torch's own words recommend to read the file without its restrictions.
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
