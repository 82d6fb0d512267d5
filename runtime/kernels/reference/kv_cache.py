"""A layer's keys and values in the reference: float32, or FP8 with a scale for each KV head.

FP8 is e4m3: a number is stored as e4m3(number / scale), rounded to nearest even, and read as e4m3 number * scale in
float32. Finite numbers beyond 448 * scale saturate, others become NaN.

Attention's products read only float32. So the blocks that a forward reads are first dequantized into memory that all
layers of one shape share, at the same block indexes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache

_FP8: Final = torch.float8_e4m3fn
_LARGEST: Final = np.float32(torch.finfo(_FP8).max)
_NUMBERS: Final = torch.arange(256, dtype=torch.uint8).view(_FP8).float().numpy()  # by their bits


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The keys and values of one layer.

    keys, values: float32 [num_blocks, block_size, kv_heads, head_dim], read by attention. stored: their FP8 bits, keys
    then values, uint8 of the same shape; empty without FP8. by_head: views for attention's products: keys [head_dim, KV
    slots * kv_heads], values [KV slots * kv_heads, head_dim].
    """

    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    stored: tuple[NDArray[np.uint8], ...]
    by_head: tuple[torch.Tensor, torch.Tensor]

    def write(
        self, slots: NDArray[np.int64], k: NDArray[np.float32], v: NDArray[np.float32], scales: torch.Tensor | None
    ) -> None:
        """Store tokens. slots: [T] of the cache. k, v: [T, kv_heads, head_dim]. scales: float32 [2, kv_heads]; None
        without FP8."""
        if scales is None:
            _by_slot(self.keys)[slots] = k
            _by_slot(self.values)[slots] = v
            return
        for stored, numbers, scale in zip(self.stored, (k, v), scales.numpy(), strict=True):
            _by_slot(stored)[slots] = _quantized(numbers, scale[:, None])

    def read(self, blocks: NDArray[np.int64], scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values for attention: see `by_head`. blocks: the blocks to dequantize, each once."""
        if scales is not None:
            for stored, numbers, scale in zip(self.stored, (self.keys, self.values), scales.numpy(), strict=True):
                numbers[blocks] = _NUMBERS[stored[blocks]] * scale[:, None]
        return self.by_head


def layer_caches(cache: KVCache) -> tuple[LayerCache, ...]:
    """Make the caches of attention layers. Layers of one shape share the memory of dequantized blocks."""
    rooms: dict[torch.Size, tuple[torch.Tensor, torch.Tensor]] = {}
    found = []
    for keys, values in zip(cache.keys, cache.values, strict=True):
        stored: tuple[NDArray[np.uint8], ...] = ()
        if keys.dtype == _FP8:
            stored = (keys.view(torch.uint8).numpy(), values.view(torch.uint8).numpy())
            if keys.shape not in rooms:
                rooms[keys.shape] = torch.empty(keys.shape), torch.empty(keys.shape)
            keys, values = rooms[keys.shape]
        head_dim = keys.shape[-1]
        by_head = keys.view(-1, head_dim).t(), values.view(-1, head_dim)
        found.append(LayerCache(keys.numpy(), values.numpy(), stored, by_head))
    return tuple(found)


def blocks_read(batch: ForwardBatch, cache: KVCache) -> NDArray[np.int64]:
    """Return the blocks of live rows, each once; none if the cache is float32, which attention reads in place."""
    if not cache.keys or cache.keys[0].dtype != _FP8:
        return np.zeros(0, np.int64)
    tables: NDArray[np.int32] = batch.block_tables.numpy()
    begins = np.arange(tables.shape[1]) * cache.block_size
    return np.unique(tables[begins < batch.seq_lens.numpy()[:, None]]).astype(np.int64)


def _by_slot(blocks: NDArray[np.generic]) -> NDArray[np.generic]:
    """View blocks as [KV slots, kv_heads, head_dim]."""
    return blocks.reshape(-1, *blocks.shape[2:])


def _quantized(numbers: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantize to FP8 bits of the same shape."""
    bounded = np.clip(numbers / scale, -_LARGEST, _LARGEST)
    bounded[~np.isfinite(numbers)] = np.nan
    bits: NDArray[np.uint8] = torch.from_numpy(bounded).to(_FP8).view(torch.uint8).numpy()
    return bits
