"""The seam between a decoder and the kernels that run it: `reference` in plain torch, and Triton kernels for CUDA.

T is the number of query tokens of a forward, a multiple of `row_multiple`. Every tensor is on the kernel set's device
and of the model's dtype unless said otherwise. No method may wait for the device, and none may read a tensor's values
on the host, the reference apart, which runs where host and device are one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.forward_batch import ForwardBatch, KVCache


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all attention layers of a model share. Query head h reads KV head h // (heads // kv_heads).

    scale: multiplies the scores. norm_eps: of the query and key norms, where a model has them.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    norm_eps: float

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer's attention.

    index: which pair of `KVCache` tensors is its own.
    window: a token attends to itself and the window - 1 tokens before it; 0: to all before it.
    q_norm, k_norm: [head_dim] RMS norm weights applied to every head before the rotation, or None.
    """

    index: int
    window: int
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary angles by position. Element i of a head is rotated with element i + head_dim // 2."""

    cos: torch.Tensor  # float32 [positions, head_dim // 2]
    sin: torch.Tensor  # float32 [positions, head_dim // 2]


class ForwardAttention(Protocol):
    """The attention of one forward: what depends on the batch alone was prepared when it was made."""

    def attend(self, layer: AttentionLayer, qkv: torch.Tensor) -> torch.Tensor:
        """Normalise (where the layer does) and rotate Q and K, write K and V to `slot_mapping`, then attend causally.

        qkv: [T, (heads + 2 * kv_heads) * head_dim], queries, keys, values; it may be overwritten.
        Returns [T, heads * head_dim]. A token of a row with seq_len 0 gets zeros, and nothing beyond a row's length
        reaches a result, whatever the cache holds there.
        """


class KernelSet(Protocol):
    """Everything a dense decoder computes, apart from the order in which it does."""

    @property
    def row_multiple(self) -> int:
        """The decoder pads the tokens of a forward to a multiple of this with tokens of the null block."""

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the KV cache for a model of this dtype."""

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """A matrix [out, in] as `linear` likes it in memory: the same shape and values, any strides. Called at load."""

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """token_ids: int64 [T], inside the vocabulary. table: [vocab, hidden]. Returns [T, hidden]."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: [n, in], any n. weight: [out, in], packed. bias: [out]. Returns x @ weight.T + bias, [n, out]."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x: [T, hidden]. Returns x / sqrt(mean(x^2) + eps) * weight, the mean in float32."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [T, hidden]; either may be overwritten. Returns (rms_norm(x + residual), x + residual)."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: [T, 2 * n], gate first; it may be overwritten. Returns silu(gate) * up, [T, n]."""

    def begin(self, batch: ForwardBatch, cache: KVCache, shape: AttentionShape, rope: RopeTable) -> ForwardAttention:
        """Prepare the attention of one forward.

        The batch's token_ids, positions and slot_mapping are already padded to T, which may be more than
        `batch.num_tokens`: the query tokens that rows own. positions may be anything for padding and masked rows.
        """
