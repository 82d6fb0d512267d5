"""The kernel set of CUDA: Triton kernels, and the vendor's matrix products where those are faster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.layer_products import products_of
from runahead.runtime.kernels.layers import (
    Attention,
    Dense,
    EmbeddingAndHead,
    Experts,
    FeedForward,
    Fuse,
    GatedDelta,
    Linear,
    Mamba2,
    Mixer,
    Ungated,
)
from runahead.runtime.kernels.triton.forward.buffers import DecodeBuffers
from runahead.runtime.kernels.triton.forward.decode import (
    MAX_ROWS,
    FusedRows,
    Join,
    RowStream,
)
from runahead.runtime.kernels.triton.forward.large_decode import VendorRows
from runahead.runtime.kernels.triton.forward.mixed import ExactMixedRows, ManyRows
from runahead.runtime.kernels.triton.forward.one_row import OneRow
from runahead.runtime.kernels.triton.forward.unfused_products import head_of_one_row, one_sum, product_of_rows
from runahead.runtime.kernels.triton.gemm.cublaslt import cublaslt_product, exact_product
from runahead.runtime.kernels.triton.gemm.tuning import is_one_sum, takes_depth, takes_products_of
from runahead.runtime.kernels.triton.moe.layer import PackedExperts
from runahead.runtime.kernels.triton.ops.put_rows import put_rows
from runahead.runtime.kernels.triton.ops.softcap import bound_logits

Stream = RowStream | ManyRows | ExactMixedRows


class TritonBoundKernels:
    """`BoundKernels` of Triton. Lengths and tables are read on the device."""

    def __init__(self, emb: EmbeddingAndHead, exact: bool) -> None:
        self._emb = emb
        self._exact = exact
        self._buffers = DecodeBuffers()
        # What a few rows' residual is multiplied by before its norm may leave float16, and float32 has no matrix units.
        self._fuses = emb.embedding.dtype == torch.bfloat16

    def attention(self, weights: Attention, place: int) -> Callable[[Stream], None]:
        self._buffers.add(weights.shape, weights.window)
        self._adapt_to(weights)
        return lambda stream: stream.attention(weights, place)

    def mamba2(self, weights: Mamba2, place: int) -> Callable[[Stream], None]:
        self._adapt_to(weights)
        return lambda stream: stream.recurrent(weights, place)

    def gated_delta(self, weights: GatedDelta, place: int) -> Callable[[Stream], None]:
        self._adapt_to(weights)
        return lambda stream: stream.recurrent(weights, place)

    def dense(self, weights: Dense) -> Callable[[Stream], None]:
        self._adapt_to(weights)
        return lambda stream: stream.dense(weights)

    def ungated(self, weights: Ungated) -> Callable[[Stream], None]:
        self._adapt_to(weights)
        return lambda stream: stream.ungated(weights)

    def experts(self, weights: Experts) -> Callable[[Stream], None]:
        self._adapt_to(weights)
        packed = PackedExperts.of(weights)
        return lambda stream: stream.experts(packed)

    def fuse(self, weights: Fuse) -> Callable[[RowStream, Join], None]:
        """What a draft head begins a decode launch with: see `RowStream.fuse`."""
        self._adapt_to(weights)
        product = weights.product
        return lambda stream, join: stream.fuse(join, product)

    def stream(self, batch: ForwardBatch, cache: KVCache, joins: bool = False) -> AbstractContextManager[Stream]:
        """joins: it begins with `fuse`, in a decode launch, and no query token is embedded by itself."""
        if self._exact:
            assert self._fuses, "products of any number of rows need bfloat16, and depths in multiples of 64"
            if batch.is_decode:
                return nullcontext(FusedRows(batch, cache, self._emb, self._buffers, exact=True))
            return nullcontext(ExactMixedRows(batch, cache, self._emb, self._buffers))
        if not batch.is_decode:
            return nullcontext(ManyRows(batch, cache, self._emb, self._buffers))
        if batch.num_tokens == 1:
            return nullcontext(OneRow(batch, cache, self._emb, self._buffers, joins))
        if self._fuses and batch.num_tokens <= MAX_ROWS:
            return nullcontext(FusedRows(batch, cache, self._emb, self._buffers))
        return nullcontext(VendorRows(batch, cache, self._emb, self._buffers, joins))

    def end(self, stream: Stream) -> torch.Tensor:
        return stream.end()

    def _adapt_to(self, part: Mixer | FeedForward | Fuse) -> None:
        self._fuses = self._fuses and takes_products_of(part)
        self._exact = self._exact or any(linear.quantized is not None for linear in products_of(part))


class TritonKernelSet:
    """A `runahead.runtime.kernels.kernel_set.KernelSet` for CUDA tensors. float32 products are true float32, not
    tf32.

    exact: a row's bits hang on itself alone, and not on how many rows or chunks there are beside it. Of bfloat16 models
    whose depths are multiples of 64.
    """

    def __init__(self, exact: bool = False) -> None:
        self._exact = exact

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.contiguous()

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not self._exact:
            return cublaslt_product(x, Linear(weight, bias))
        out = x.new_empty((x.shape[0], weight.shape[0]))
        product_of_rows(x, Linear(weight, bias), out, exact=True)
        return out

    def bound(self, logits: torch.Tensor, cap: float) -> None:
        bound_logits(logits, cap)

    def logits_into(
        self, hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, places: torch.Tensor, cap: float = 0.0
    ) -> None:
        fits = weight.dtype == torch.bfloat16 and takes_depth(weight.shape[1])
        if self._exact and hidden.shape[0] > MAX_ROWS and is_one_sum(*weight.shape):
            found = torch.empty((hidden.shape[0], weight.shape[0]), dtype=torch.float32, device=hidden.device)
            exact_product(hidden, weight, found, one_sum)
            put_rows(found, out, places)
        elif self._exact:
            product_of_rows(hidden, Linear(weight, None), out, exact=True, places=places)
        elif hidden.shape[0] == 1:
            head_of_one_row(hidden, weight, out, places)
        elif hidden.shape[0] <= MAX_ROWS and fits:
            product_of_rows(hidden, Linear(weight, None), out, places=places)
        else:
            found = torch.empty((hidden.shape[0], weight.shape[0]), dtype=torch.float32, device=hidden.device)
            put_rows(cublaslt_product(hidden, Linear(weight, None), found), out, places)
        if cap:
            bound_logits(out, cap, places)

    def bind(self, emb: EmbeddingAndHead) -> TritonBoundKernels:
        return TritonBoundKernels(emb, self._exact)
