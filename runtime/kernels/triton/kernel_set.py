"""The kernel set of CUDA: Triton kernels, and the vendor's matrix products through torch for more than one row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.layers import Attention, Dense, Ends, Linear
from runahead.runtime.kernels.triton import activation, embedding
from runahead.runtime.kernels.triton.chunk_attention import chunk_attention
from runahead.runtime.kernels.triton.decode_streams import (
    MAX_ROWS,
    DecodeBuffers,
    DecodeStream,
    FewRows,
    OneRow,
    VendorRows,
    head_of_few_rows,
    head_of_one_row,
)
from runahead.runtime.kernels.triton.norms import LateSum
from runahead.runtime.kernels.triton.rotary import rotate_and_write
from runahead.runtime.kernels.triton.tilings import takes_depth


class ManyRows:
    """Any batch: the vendor's products, and a kernel for each thing beside them."""

    def __init__(self, batch: ForwardBatch, cache: KVCache, ends: Ends) -> None:
        self._batch, self._cache, self._ends = batch, cache, ends
        self._sum = LateSum(embedding.embed(batch.token_ids, ends.embedding))

    def attention(self, weights: Attention, place: int) -> None:
        shape, batch, rope = weights.shape, self._batch, self._ends.rope
        keys, values = self._cache.keys[place], self._cache.values[place]
        qkv = _product(self._sum.normed(weights.norm), weights.qkv)
        q = rotate_and_write(
            qkv, rope.cos, rope.sin, batch.positions, batch.slot_mapping, keys, values, shape.heads,
            weights.q_norm, weights.k_norm,
        )  # fmt: skip
        longest = batch.num_tokens - batch.num_rows + 1
        attended = chunk_attention(
            q, keys, values, batch.block_tables, batch.seq_lens, batch.query_start_loc, longest, shape.scale,
            weights.window,
        )  # fmt: skip
        self._sum.add(_product(attended.view(qkv.shape[0], shape.q_size), weights.o))

    def dense(self, weights: Dense) -> None:
        gated = activation.silu_mul(_product(self._sum.normed(weights.norm), weights.gate_up))
        self._sum.add(_product(gated, weights.down))

    def end(self) -> torch.Tensor:
        return self._sum.normed(self._ends.final_norm)


Stream = DecodeStream | ManyRows


class TritonBoundKernels:
    """`BoundKernels` of Triton. Lengths and tables are read on the device."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._buffers = DecodeBuffers()
        # What a few rows' residual is multiplied by before its norm may leave float16, and float32 has no matrix units.
        self._fuses = ends.embedding.dtype == torch.bfloat16

    def attention(self, weights: Attention, place: int) -> Callable[[Stream], None]:
        self._buffers.add(weights.shape, weights.window)
        self._look_at(weights.qkv, weights.o)
        return lambda stream: stream.attention(weights, place)

    def dense(self, weights: Dense) -> Callable[[Stream], None]:
        self._look_at(weights.gate_up, weights.down)
        return lambda stream: stream.dense(weights)

    def stream(self, batch: ForwardBatch, cache: KVCache) -> AbstractContextManager[Stream]:
        if not batch.is_decode:
            return nullcontext(ManyRows(batch, cache, self._ends))
        if batch.num_tokens == 1:
            return nullcontext(OneRow(batch, cache, self._ends, self._buffers))
        if self._fuses and batch.num_tokens <= MAX_ROWS:
            return nullcontext(FewRows(batch, cache, self._ends, self._buffers))
        return nullcontext(VendorRows(batch, cache, self._ends, self._buffers))

    def end(self, stream: Stream) -> torch.Tensor:
        return stream.end()

    def _look_at(self, *products: Linear) -> None:
        self._fuses = self._fuses and all(takes_depth(linear.weight.shape[1]) for linear in products)


class TritonKernelSet:
    """A `runahead.runtime.kernels.kernel_set.KernelSet` for CUDA tensors. float32 products are true float32, not
    tf32."""

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.contiguous()

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def logits_into(self, hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        if hidden.shape[0] == 1:
            head_of_one_row(hidden, weight, out)
        elif hidden.shape[0] <= MAX_ROWS and weight.dtype == torch.bfloat16 and takes_depth(weight.shape[1]):
            head_of_few_rows(hidden, weight, out)
        else:
            out.copy_(F.linear(hidden, weight))  # which converts it

    def bind(self, ends: Ends) -> TritonBoundKernels:
        return TritonBoundKernels(ends)


def _product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    return F.linear(x, linear.weight, linear.bias)
