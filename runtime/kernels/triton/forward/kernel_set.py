"""The kernel set of CUDA: Triton kernels, and the vendor's matrix products where those are faster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.layers import (
    Attention,
    Dense,
    EmbeddingAndHead,
    Experts,
    Fuse,
    GatedDelta,
    Linear,
    Mamba2,
    Ungated,
)
from runahead.runtime.kernels.triton.forward.buffers import DecodeBuffers
from runahead.runtime.kernels.triton.forward.decode import MAX_ROWS, Join, RowStream
from runahead.runtime.kernels.triton.forward.mixed import MixedRows
from runahead.runtime.kernels.triton.forward.unfused_products import one_sum, product_of_rows, sums_of
from runahead.runtime.kernels.triton.gemm.cublaslt import exact_product
from runahead.runtime.kernels.triton.gemm.epilogue import STORE
from runahead.runtime.kernels.triton.gemm.separate_epilogue import finish_product
from runahead.runtime.kernels.triton.gemm.tuning import is_one_sum
from runahead.runtime.kernels.triton.moe.layer import PackedExperts
from runahead.runtime.kernels.triton.ops.put_rows import put_rows
from runahead.runtime.kernels.triton.ops.softcap import bound_logits


class TritonBoundKernels:
    """`BoundKernels` of Triton. Lengths and tables are read on the device."""

    def __init__(self, emb: EmbeddingAndHead) -> None:
        self._emb = emb
        self._buffers = DecodeBuffers()

    def attention(self, weights: Attention, cache_index: int) -> Callable[[RowStream], None]:
        self._buffers.add(weights.shape, weights.window)
        return lambda stream: stream.attention(weights, cache_index)

    def mamba2(self, weights: Mamba2, cache_index: int) -> Callable[[RowStream], None]:
        return lambda stream: stream.recurrent(weights, cache_index)

    def gated_delta(self, weights: GatedDelta, cache_index: int) -> Callable[[RowStream], None]:
        return lambda stream: stream.recurrent(weights, cache_index)

    def dense(self, weights: Dense) -> Callable[[RowStream], None]:
        return lambda stream: stream.dense(weights)

    def ungated(self, weights: Ungated) -> Callable[[RowStream], None]:
        return lambda stream: stream.ungated(weights)

    def experts(self, weights: Experts) -> Callable[[RowStream], None]:
        packed = PackedExperts.of(weights)
        return lambda stream: stream.experts(packed)

    def fuse(self, weights: Fuse) -> Callable[[RowStream, Join], None]:
        """Return a draft head's first step of a decode launch: see `RowStream.fuse`."""
        product = weights.product
        return lambda stream, join: stream.fuse(join, product)

    def stream(self, batch: ForwardBatch, cache: KVCache) -> AbstractContextManager[RowStream]:
        kind = RowStream if batch.is_decode else MixedRows
        return nullcontext(kind(batch, cache, self._emb, self._buffers))

    def end(self, stream: RowStream) -> torch.Tensor:
        return stream.end()


class TritonKernelSet:
    """A `runahead.runtime.kernels.kernel_set.KernelSet` for CUDA tensors. A row's bits depend on that row alone, and
    not on how many rows or chunks there are beside it. float32 products are true float32, not tf32."""

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.contiguous()

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        linear, rows = Linear(weight, bias), x.shape[0]
        if rows > MAX_ROWS and is_one_sum(*weight.shape):
            return finish_product(sums_of(x, linear, rows, lambda wanted: False), linear, None, STORE)
        out = x.new_empty((rows, weight.shape[0]))
        product_of_rows(x, linear, out)
        return out

    def bound(self, logits: torch.Tensor, cap: float) -> None:
        bound_logits(logits, cap)

    def logits_into(
        self, hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, targets: torch.Tensor, cap: float = 0.0
    ) -> None:
        if hidden.shape[0] > MAX_ROWS and is_one_sum(*weight.shape):
            found = torch.empty((hidden.shape[0], weight.shape[0]), dtype=torch.float32, device=hidden.device)
            exact_product(hidden, weight, found, one_sum)
            put_rows(found, out, targets)
        else:
            product_of_rows(hidden, Linear(weight, None), out, targets)
        if cap:
            bound_logits(out, cap, targets)

    def bind(self, emb: EmbeddingAndHead) -> TritonBoundKernels:
        return TritonBoundKernels(emb)
