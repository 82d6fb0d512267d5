"""Computes a model's device memory: weights, and mixers' data of rows in blocks and state slots.

Each kind of mixer declares its data (`runahead.runtime.kernels.layers.Kept`); this module adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

import torch

from runahead.runtime.kernels.forward_batch import KVCache
from runahead.runtime.kernels.layers import Kept, Layer
from runahead.runtime.models.architecture import HeadWeights, ModelWeights

FP8_KV: Final = torch.float8_e4m3fn  # of keys and values with scales


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """Bytes of all layers together: of a KV block, of a row's state slot, and of a snapshot of a state."""

    block: int
    row: int
    snapshot: int = 0

    @property
    def holds_drafts(self) -> bool:
        """Whether a state slot has room for the inputs of drafts, which a snapshot has not."""
        return self.row > self.snapshot > 0


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a model keeps of rows. kept: by each layer's mixer, in order; None for layers without a mixer."""

    kept: tuple[Kept, ...]

    def bytes_kept(self, block_size: int, dtype: torch.dtype, drafts: int = 0) -> KeptBytes:
        """Add up the bytes. dtype: of the KV cache. drafts: most of a row and launch."""
        numbers = sum(kv_heads * head_dim for kv_heads, head_dim in self._kv())
        state = sum(kept.state_bytes for kept in self.kept)
        runs = sum(kept.run_bytes(drafts) for kept in self.kept)
        return KeptBytes(2 * block_size * numbers * dtype.itemsize, state + runs, state)

    def make_cache(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        state_slots: int = 0,
        snapshots: int = 0,
        drafts: int = 0,
    ) -> KVCache:
        """Make a zeroed cache, with an entry for each mixer with keys and values, and for each with a state; block 0 is
        the null block. dtype: of keys and values. drafts: most of a row and launch.
        """

        def make() -> tuple[torch.Tensor, ...]:
            shapes = ((num_blocks, block_size, *size) for size in self._kv())
            return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)

        states = tuple(
            tuple(torch.zeros((state_slots + snapshots, *shape), device=device) for shape in kept.state)
            for kept in self.kept
            if kept.state
        )
        runs = tuple(torch.zeros((state_slots, drafts, kept.inputs), device=device) for kept in self.kept if kept.state)
        return KVCache(make(), make(), block_size, states, runs)

    def _kv(self) -> list[tuple[int, int]]:
        return [kept.kv for kept in self.kept if kept.kv is not None]


def memory_of(layers: tuple[Layer, ...]) -> ModelMemory:
    """Return what these layers declare; their weights may be descriptions
    (`runahead.runtime.models.weights.described`).
    """
    return ModelMemory(tuple(Kept() if layer.mixer is None else layer.mixer.keeps for layer in layers))


def weight_bytes(weights: ModelWeights | HeadWeights) -> int:
    """Return the bytes of the tensors of a model or draft head; shared ones count once."""
    return sum(dict(map(_address_and_bytes, _tensors(weights))).values())


def _address_and_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's address, equal for shared memory, and its bytes."""
    if tensor.layout is not torch.strided:  # packed by a library, which hides the address
        return id(tensor), tensor.numel() * tensor.dtype.itemsize
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        if not part.is_meta:  # a quantized weight's tensors are elsewhere
            yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _tensors(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))
