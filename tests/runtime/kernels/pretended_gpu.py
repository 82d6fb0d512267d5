"""What Triton asks of a GPU and of its tensors, where there is none."""

from __future__ import annotations

from typing import Any

import torch


class NoGpu:
    """A driver of Triton that has no GPU, and says which one it would have."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * self._capability[0] + self._capability[1], 32)


class Address:
    """What Triton looks at in a tensor that a kernel is given. Tensors begin at addresses that are multiples of 16."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._at = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._at
