"""The seam between a decoder and the kernels that run it: `reference` for the CPU, and Triton kernels for CUDA.

T is the number of query tokens of a forward. Every tensor is on the kernel set's device and of the model's dtype unless
said otherwise. No method may wait for the device, and none may read a tensor's values on the host, the reference apart,
which runs where host and device are one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from runahead.cuda_graphs.enqueue_watch import unwatched
from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache


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
class RopeTable:
    """Rotary angles by position. Element i of a head is rotated with element i + head_dim // 2."""

    cos: torch.Tensor  # float32 [positions, head_dim // 2]
    sin: torch.Tensor  # float32 [positions, head_dim // 2]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in], packed; q, k and v are one matrix, and so are gate and up."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim] RMS norm of every query head before the rotation
    k_norm: torch.Tensor | None  # [head_dim]
    o: torch.Tensor  # [hidden, heads * head_dim]
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [hidden, intermediate]
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Layers:
    """A decoder from the embedding to the final norm. norm_eps: of every norm.

    windows: one a layer; a token attends to itself and the window - 1 tokens before it; 0: to all before it.
    """

    shape: AttentionShape
    windows: tuple[int, ...]
    norm_eps: float
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    rope: RopeTable


class BoundLayers(Protocol):
    """`Layers` bound to kernels: the forward of one model. May keep buffers: it serves one thread."""

    def forward(self, batch: ForwardBatch, cache: KVCache, between: Callable[[], None] = unwatched) -> torch.Tensor:
        """Write the K and V of the batch's tokens to `slot_mapping`. Returns hidden states after the final norm.

        between: called after each layer; where host and device are two, when it has been enqueued.

        For every layer: x += attention(norm(x)), causal, Q and K normalised (where the layer does) and rotated; then
        x += down(silu(gate) * up), with gate and up of norm(x). Norms are x / sqrt(mean(x^2) + eps) * weight, the mean
        in float32. Returns [num_tokens, hidden]. Attention of a row with seq_len 0 is zero, and nothing beyond a row's
        length reaches a result, whatever the cache holds there. positions may be anything for masked rows.
        """


class KernelSet(Protocol):
    """Everything a dense decoder computes."""

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the KV cache for a model of this dtype."""

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """A matrix [out, in] as `linear` likes it in memory: the same shape and values, any strides. Called at load."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: [n, in], any n. weight: [out, in], packed. bias: [out]. Returns x @ weight.T + bias, [n, out]."""

    def bind(self, layers: Layers) -> BoundLayers:
        """Prepare the layers of one model, their matrices packed by this kernel set."""
