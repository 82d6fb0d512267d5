"""What a model takes of a device's memory: its weights, and what its mixers keep of rows, in blocks and state slots.

Each kind of mixer declares what it keeps (`runahead.runtime.kernels.layers.Kept`); here it is added up.
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
    """Of all layers together. block: of a KV block. row: of a state slot, of which each row has one. snapshot: of a
    snapshot of a state."""

    block: int
    row: int
    snapshot: int = 0

    @property
    def holds_drafts(self) -> bool:
        """A state slot has room for the inputs of drafts, which a snapshot has not."""
        return self.row > self.snapshot > 0


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """kept: by each layer's mixer, in the layers' order; nothing by a layer without one."""

    kept: tuple[Kept, ...]

    def bytes_kept(self, block_size: int, dtype: torch.dtype, drafts: int = 0) -> KeptBytes:
        """dtype: of the KV cache. drafts: of a row and launch, at most."""
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
        """A zeroed cache, with a place for each mixer that keeps keys and values, and one for each that keeps a state;
        block 0 is the null block. dtype: of keys and values. drafts: of a row and launch, at most."""

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
    """What these layers declare; their weights may be described alone (`runahead.runtime.models.weights.described`)."""
    return ModelMemory(tuple(Kept() if layer.mixer is None else layer.mixer.keeps for layer in layers))


def weight_bytes(weights: ModelWeights | HeadWeights) -> int:
    """Bytes that the tensors of a model or a draft head take as they lie in memory: one with two uses counts once."""
    return sum(dict(map(_place_and_bytes, _tensors(weights))).values())


def _place_and_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """The same place for tensors that share their memory."""
    if tensor.layout is not torch.strided:  # packed as a library likes it, which does not say where or how
        return id(tensor), tensor.numel() * tensor.dtype.itemsize
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        if not part.is_meta:  # a quantized weight is held elsewhere
            yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _tensors(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))
