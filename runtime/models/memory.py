"""What a model keeps of the tokens that it has read: the one place that says so."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runahead.runtime.kernels.forward_batch import KVCache
from runahead.runtime.kernels.layers import Layer


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """kv: (kv_heads, head_dim) of each mixer that keeps a key and a value of every token, in the layers' order."""

    kv: tuple[tuple[int, int], ...]

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one KV block in all layers."""
        return sum(2 * block_size * kv_heads * head_dim * dtype.itemsize for kv_heads, head_dim in self.kv)

    def make_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        """A zeroed cache; block 0 is the null block."""

        def make() -> tuple[torch.Tensor, ...]:
            shapes = ((num_blocks, block_size, *size) for size in self.kv)
            return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)

        return KVCache(make(), make(), block_size)


def memory_of(layers: tuple[Layer, ...]) -> ModelMemory:
    """What these layers declare; their weights may be described alone (`runahead.runtime.models.weights.described`)."""
    return ModelMemory(tuple((layer.mixer.shape.kv_heads, layer.mixer.shape.head_dim) for layer in layers))
