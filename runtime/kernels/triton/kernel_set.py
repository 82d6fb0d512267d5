"""The kernel set of CUDA: Triton kernels, and the vendor's matrix products through torch for more than one row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.layers import Attention, AttentionShape, Dense, Ends, Linear, Norm
from runahead.runtime.kernels.triton import activation, embedding, norms
from runahead.runtime.kernels.triton.chunk_attention import chunk_attention
from runahead.runtime.kernels.triton.decode_attention import decode_attention
from runahead.runtime.kernels.triton.gemv import gemv
from runahead.runtime.kernels.triton.rotary import rotate_and_write


@dataclass(slots=True)
class TritonStream:
    """A batch's tokens under way. The sum of residual and product is made by the norm that follows."""

    batch: ForwardBatch
    cache: KVCache
    residual: torch.Tensor  # [T, hidden]
    product: torch.Tensor | None = None  # [T, hidden] what the residual still lacks

    def normed(self, norm: Norm) -> torch.Tensor:
        """The norm of the whole sum, which the residual then is."""
        if self.product is None:
            return norms.rms_norm(self.residual, norm.weight, norm.eps)
        product, self.product = self.product, None
        return norms.add_rms_norm(product, self.residual, norm.weight, norm.eps)


class TritonBoundKernels:
    """`BoundKernels` of Triton. Lengths and tables are read on the device."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends

    def attention(self, weights: Attention, place: int) -> Callable[[TritonStream], None]:
        shape, rope = weights.shape, self._ends.rope

        def mix(stream: TritonStream) -> None:
            batch, keys, values = stream.batch, stream.cache.keys[place], stream.cache.values[place]
            qkv = _product(stream.normed(weights.norm), weights.qkv)
            q = rotate_and_write(
                qkv, rope.cos, rope.sin, batch.positions, batch.slot_mapping, keys, values, shape.heads,
                weights.q_norm, weights.k_norm,
            )  # fmt: skip
            attended = _attend(q, keys, values, batch, shape, weights.window)
            stream.product = _product(attended.view(qkv.shape[0], shape.q_size), weights.o)

        return mix

    def dense(self, weights: Dense) -> Callable[[TritonStream], None]:
        def feed_forward(stream: TritonStream) -> None:
            gated = activation.silu_mul(_product(stream.normed(weights.norm), weights.gate_up))
            stream.product = _product(gated, weights.down)

        return feed_forward

    def stream(self, batch: ForwardBatch, cache: KVCache) -> AbstractContextManager[TritonStream]:
        return nullcontext(TritonStream(batch, cache, embedding.embed(batch.token_ids, self._ends.embedding)))

    def end(self, stream: TritonStream) -> torch.Tensor:
        return stream.normed(self._ends.final_norm)


class TritonKernelSet:
    """A `runahead.runtime.kernels.kernel_set.KernelSet` for CUDA tensors. float32 products are true float32, not
    tf32."""

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.contiguous()

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return _linear(x, weight, bias)

    def bind(self, ends: Ends) -> TritonBoundKernels:
        return TritonBoundKernels(ends)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: ForwardBatch, shape: AttentionShape, window: int
) -> torch.Tensor:
    """Split over the context where every row has one query, tiled by queries otherwise. Returns [T, heads, head_dim]"""
    tables, seq_lens = batch.block_tables, batch.seq_lens
    if batch.is_decode:
        return decode_attention(q, keys, values, tables, seq_lens, shape.scale, window, batch.max_seq_len)
    longest = batch.num_tokens - batch.num_rows + 1
    return chunk_attention(q, keys, values, tables, seq_lens, batch.query_start_loc, longest, shape.scale, window)


def _product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    return _linear(x, linear.weight, linear.bias)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gemv(x, weight, bias) if x.shape[0] == 1 else F.linear(x, weight, bias)
