"""Buffers of a forward with T query tokens, shared by torch's products and NumPy's elementwise work.

Made once for each T with all views, and used by every layer and forward, so a step allocates almost nothing. T is
padded for the products; padding is token 0 at position 0, written to the null block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import AttentionShape
from runahead.runtime.kernels.ranks import Share
from runahead.runtime.kernels.reference.linear import Products
from runahead.runtime.kernels.reference.ops import RmsNorm, Rotation

# Floats are float32. A tensor and an array of one name share memory; `..._parts` are split for a product.


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers of a batch's tokens, independent of layers."""

    tokens: int  # T
    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T] of the cache
    residual: torch.Tensor  # [T, hidden]
    residual_array: NDArray[np.float32]
    norm: RmsNorm  # from the residual to a product's input
    normed_parts: tuple[torch.Tensor, ...]  # of [T, hidden]
    residual_parts: tuple[torch.Tensor, ...]
    branch: torch.Tensor  # [T, hidden], what is summed over ranks, or normalised, before it is added to the residual
    branch_array: NDArray[np.float32]
    branch_norm: RmsNorm  # in place

    @staticmethod
    def make(tokens: int, hidden: int, products: Products) -> Buffers:
        residual, normed = torch.zeros((2, tokens, hidden)).unbind()
        branch = torch.zeros((tokens, hidden))
        return Buffers(
            tokens=tokens,
            token_ids=np.zeros(tokens, np.int64),
            positions=np.zeros(tokens, np.int64),
            slots=np.zeros(tokens, np.int64),
            residual=residual,
            residual_array=residual.numpy(),
            norm=RmsNorm.of(residual.numpy(), normed.numpy()),
            normed_parts=products.cut(normed),
            residual_parts=products.cut(residual),
            branch=branch,
            branch_array=branch.numpy(),
            branch_norm=RmsNorm.of(branch.numpy(), branch.numpy()),
        )

    def embed(self, embedding: NDArray[np.float32], share: Share) -> None:
        """Copy the tokens' embeddings into the residual, zeros for other ranks' tokens. embedding: [vocab / ranks,
        hidden].
        """
        count = len(embedding)
        places = self.token_ids - share.rank * count
        np.take(embedding, places, axis=0, out=self.residual_array, mode="clip")
        if not share.is_whole:
            self.residual_array[(places < 0) | (places >= count)] = 0.0

    def take(self, batch: ForwardBatch) -> None:
        """Set the batch's tokens, padded to T."""
        count = batch.num_tokens
        for mine, given in (
            (self.token_ids, batch.token_ids),
            (self.positions, batch.positions),
            (self.slots, batch.slot_mapping),
        ):
            mine[:count] = given.numpy()
            mine[count:] = 0


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    """Buffers of attention layers of one shape."""

    qkv: torch.Tensor  # [T, (heads + 2 * kv_heads) * head_dim]
    heads: torch.Tensor  # [T * (heads + 2 * kv_heads), head_dim], the same memory
    k: NDArray[np.float32]  # [T, kv_heads, head_dim], of `qkv`
    v: NDArray[np.float32]
    q_norm: RmsNorm  # of every query head, in place
    k_norm: RmsNorm
    whole_q_norm: RmsNorm  # over all query heads of a token, in place
    whole_k_norm: RmsNorm
    rotation: Rotation  # of q and k, in place

    @staticmethod
    def make(tokens: int, shape: AttentionShape) -> AttentionBuffers:
        rotated, heads = shape.heads + shape.kv_heads, shape.heads + 2 * shape.kv_heads
        qkv = torch.zeros((tokens, heads * shape.head_dim))
        by_head = qkv.numpy().reshape(tokens, heads, shape.head_dim)
        q, k = by_head[:, : shape.heads], by_head[:, shape.heads : rotated]
        whole_q, whole_k = qkv.numpy()[:, : shape.q_size], qkv.numpy()[:, shape.q_size : rotated * shape.head_dim]
        return AttentionBuffers(
            qkv=qkv,
            heads=qkv.view(-1, shape.head_dim),
            k=k,
            v=by_head[:, rotated:],
            q_norm=RmsNorm.of(q, q),
            k_norm=RmsNorm.of(k, k),
            whole_q_norm=RmsNorm.of(whole_q, whole_q),
            whole_k_norm=RmsNorm.of(whole_k, whole_k),
            rotation=Rotation.of(by_head.reshape(tokens, heads, 2, -1)[:, :rotated]),
        )


@dataclass(frozen=True, slots=True)
class DenseBuffers:
    """Buffers of dense layers of one width."""

    gate_up: torch.Tensor  # [T, 2 * intermediate]
    gate: NDArray[np.float32]  # [T, intermediate]
    up: NDArray[np.float32]
    gated: NDArray[np.float32]  # [T, intermediate] silu(gate) * up
    gated_parts: tuple[torch.Tensor, ...]

    @staticmethod
    def make(tokens: int, intermediate: int, products: Products) -> DenseBuffers:
        gate_up = torch.zeros((tokens, 2 * intermediate))
        gated = torch.zeros((tokens, intermediate))
        return DenseBuffers(
            gate_up=gate_up,
            gate=gate_up.numpy()[:, :intermediate],
            up=gate_up.numpy()[:, intermediate:],
            gated=gated.numpy(),
            gated_parts=products.cut(gated),
        )


@dataclass(frozen=True, slots=True)
class UngatedBuffers:
    """Buffers of feed-forwards without a gate, of one width. The tensor and the array share memory."""

    up: torch.Tensor  # [T, intermediate]
    up_array: NDArray[np.float32]
    up_parts: tuple[torch.Tensor, ...]

    @staticmethod
    def make(tokens: int, intermediate: int, products: Products) -> UngatedBuffers:
        up = torch.zeros((tokens, intermediate))
        return UngatedBuffers(up, up.numpy(), products.cut(up))
