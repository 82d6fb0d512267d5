"""The entries of a draft head by one product, where nothing lies between its first two.

A head of EAGLE-1 has no norm in front of its attention, so that keys and values are linear in the token's embedding and
the hidden state before it: two matrices become one, when the head is loaded, of a third of their size or less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.kernel_set import KernelSet
from runahead.runtime.kernels.layers import AttentionShape, Linear, RopeTable
from runahead.runtime.kernels.reference.rope import Rotation, rope_factors
from runahead.runtime.models.architecture import HeadWeights


@dataclass(frozen=True, slots=True)
class HeadEntries:
    """On the CPU. product: [embedding of a token, hidden state before it] to the keys and values of its entry, packed.
    embedding: float32 [vocab, width]. factors: of the rotation, as `rope_factors` has them."""

    product: Linear
    shape: AttentionShape
    embedding: NDArray[np.float32]
    factors: NDArray[np.float32]
    kernels: KernelSet

    @staticmethod
    def of(weights: HeadWeights, embedding: torch.Tensor, rope: RopeTable, kernels: KernelSet) -> HeadEntries | None:
        """None for a head with something else between a token and its keys."""
        mixer, fuse = weights.mixer, weights.fuse.product
        if fuse is None or not are_one_product(weights):
            return None
        first, second = unpacked(fuse.weight).double(), unpacked(mixer.qkv.weight)[mixer.shape.q_size :].double()
        bias = second @ (torch.zeros(len(first), dtype=torch.float64) if fuse.bias is None else fuse.bias.double())
        if mixer.qkv.bias is not None:
            bias += mixer.qkv.bias[mixer.shape.q_size :].double()
        has_bias = fuse.bias is not None or mixer.qkv.bias is not None
        product = Linear(kernels.pack_weight((second @ first).float()), bias.float() if has_bias else None)
        return HeadEntries(product, mixer.shape, embedding.float().numpy(), rope_factors(rope), kernels)

    def write(self, batch: ForwardBatch, hidden: NDArray[np.float32], cache: KVCache) -> None:
        """Those of the batch's tokens. hidden: float32 [T, width], of the positions before them."""
        count, shape = batch.num_tokens, self.shape
        width = self.embedding.shape[1]
        joined = np.empty((count, width + hidden.shape[1]), np.float32)
        np.take(self.embedding, batch.token_ids.numpy(), axis=0, out=joined[:, :width], mode="clip")
        joined[:, width:] = hidden
        with np.errstate(all="ignore"):  # a NaN or an infinity stays in its row
            made = self.kernels.linear(torch.from_numpy(joined), self.product.weight, self.product.bias).numpy()
            heads = made.reshape(count, 2 * shape.kv_heads, shape.head_dim)
            rotation = Rotation.of(heads.reshape(count, 2 * shape.kv_heads, 2, -1)[:, : shape.kv_heads])
            rotation.turn_to(self.factors, batch.positions.numpy())
            rotation.apply()
        slots = batch.slot_mapping.numpy()
        for tensor, part in zip((cache.keys[0], cache.values[0]), np.split(heads, 2, axis=1), strict=True):
            tensor.view(-1, shape.kv_heads, shape.head_dim).numpy()[slots] = part


def are_one_product(weights: HeadWeights) -> bool:
    """Nothing but two matrices stands between a token with its hidden state and its keys and values."""
    mixer, fuse = weights.mixer, weights.fuse
    norms = (mixer.norm, mixer.k_norm, fuse.token_norm, fuse.hidden_norm)
    return fuse.product is not None and not fuse.hidden_first and all(norm is None for norm in norms)


def unpacked(weight: torch.Tensor) -> torch.Tensor:
    """A packed matrix as an ordinary one."""
    return weight.to_dense() if weight.is_mkldnn else weight
