"""Which elements of a tensor the kernels read, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter


@contextmanager
def elements_read(tensor: torch.Tensor) -> Iterator[set[int]]:
    """The places in memory, in elements from the tensor's first, that loads have let their masks pass, of kernels that
    this thread runs meanwhile. The tensor is contiguous."""
    read: set[int] = set()
    first, size = tensor.data_ptr(), tensor.element_size()
    load = interpreter.InterpreterBuilder.create_masked_load

    def noting(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        addresses = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)].astype(np.int64)
        inside = (addresses >= first) & (addresses < first + size * tensor.numel())
        read.update(((addresses[inside] - first) // size).tolist())
        return load(self, pointers, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_masked_load", noting)
        yield read
