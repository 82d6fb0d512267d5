"""Scales of FP8 keys and values, as quantized checkpoints store them: one for all KV heads of a layer, or one for each.

Names: compressed-tensors has them beside the projections (`k_scale`, in older files `k_proj.output_scale`), ModelOpt in
them (`k_proj.k_scale`), and the first files of vLLM one for both (`kv_scale`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.quantized.numbers import FLOATS, as_float32, item_bytes, mapped
from runahead.runtime.checkpoint.refusals import AGAIN
from runahead.runtime.checkpoint.safetensors_header import SafetensorsTensor

_BOTH: Final = ("kv_scale", "attn.kv_scale")
_KEYS: Final = ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "attn.k_scale", "qkv_proj.k_scale", *_BOTH)
_VALUES: Final = ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "attn.v_scale", "qkv_proj.v_scale", *_BOTH)


class StoredKvScales:
    """Reads them by layer. stored: the checkpoint's tensors of scales, by name; none: every scale is 1."""

    def __init__(self, stored: Mapping[str, SafetensorsTensor], device: torch.device) -> None:
        self._stored = stored
        self._device = device
        self._read: set[str] = set()

    def of(self, prefix: str, kv_heads: int) -> torch.Tensor:
        """float32 [2, kv_heads], on the device: see `TensorReader`. Raises CheckpointError for a scale of another shape
        or dtype, and for one that is not finite or not above 0."""
        names = [self._name(prefix, ends) for ends in (_KEYS, _VALUES)]
        found = np.ones((2, kv_heads), np.float32)
        for row, name, other in zip(found, names, reversed(names), strict=True):
            if name is not None:
                row[:] = self._numbers(name, kv_heads)
            elif other is not None:
                raise CheckpointError(f"tensor {other} scales keys or values alone, and both need a scale; {AGAIN}")
        return torch.from_numpy(found).to(self._device)

    @property
    def unread(self) -> set[str]:
        """Names of scales of keys or values that nobody has asked for."""
        return {name for name in self._stored if name.endswith((".k_scale", ".v_scale", ".kv_scale"))} - self._read

    def _name(self, prefix: str, ends: tuple[str, ...]) -> str | None:
        return next((prefix + end for end in ends if prefix + end in self._stored), None)

    def _numbers(self, name: str, kv_heads: int) -> NDArray[np.float32]:
        """[1 or kv_heads]"""
        stored = self._stored[name]
        self._read.add(name)
        if tuple(size for size in stored.shape if size != 1) not in ((), (kv_heads,)):
            raise CheckpointError(
                f"tensor {name} has shape {list(stored.shape)}; a scale of keys or values is one number, or one for "
                f"each of {kv_heads} KV heads"
            )
        if stored.dtype not in FLOATS or stored.size_bytes != math.prod(stored.shape) * (item_bytes(stored.dtype) or 0):
            raise CheckpointError(
                f"tensor {name} is stored as {stored.dtype} in {stored.size_bytes} bytes; a scale is stored as "
                f"{', '.join(FLOATS)}"
            )
        numbers = as_float32(mapped(stored), stored.dtype).reshape(-1)
        if not (np.isfinite(numbers) & (numbers > 0)).all():
            raise CheckpointError(f"tensor {name} has a scale that is not finite or not above 0; {AGAIN}")
        return numbers
