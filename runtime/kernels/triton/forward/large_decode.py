"""A decode launch of many rows, or of another dtype than bfloat16, on its way through the layers."""

from __future__ import annotations

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.layers import Activation, EmbeddingAndHead, Linear, Norm
from runahead.runtime.kernels.triton.forward.buffers import DecodeBuffers
from runahead.runtime.kernels.triton.forward.decode import RowStream
from runahead.runtime.kernels.triton.forward.unfused_products import scores_of, with_shared
from runahead.runtime.kernels.triton.gemm.cublaslt import cublaslt_product
from runahead.runtime.kernels.triton.gemm.gemv import GATED, SQUARED
from runahead.runtime.kernels.triton.moe.layer import PackedExperts
from runahead.runtime.kernels.triton.ops import norms
from runahead.runtime.kernels.triton.ops.activation import gated_mul, squared_relu_of


class VendorRows(RowStream):
    """A launch of more rows, or of another dtype: the vendor's products, with a kernel each for norm and activation.
    joins: see `TritonBoundKernels.stream`."""

    def __init__(
        self,
        batch: ForwardBatch,
        cache: KVCache,
        emb: EmbeddingAndHead,
        buffers: DecodeBuffers,
        joins: bool = False,
    ) -> None:
        super().__init__(batch, cache, emb, buffers)
        self._sum = norms.LateSum(self._residual)
        self._work = self._begin(embeds=not joins)

    def _normed_product(
        self, norm: Norm | None, linear: Linear, epilogue: int, activation: Activation = "silu"
    ) -> torch.Tensor:
        product = cublaslt_product(self._sum.normed(norm), linear)
        if epilogue == SQUARED:
            return squared_relu_of(product)
        return gated_mul(product, activation) if epilogue == GATED else product

    def _stored(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> torch.Tensor:
        return cublaslt_product(x, linear, out)

    def left(self) -> torch.Tensor:
        return self._sum.whole()

    def _add(self, x: torch.Tensor, linear: Linear, post_norm: Norm | None) -> None:
        self._sum.add(cublaslt_product(x, linear), post_norm)

    def experts(self, experts: PackedExperts) -> None:
        x = self._sum.normed(experts.weights.norm)
        scores = scores_of(x, experts.router)
        arrived = self._buffers.arrived(self._device)
        made = experts.made(experts.results(x, scores, self._live, arrived, self._depends), self._live)
        self._sum.add(with_shared(x, made, scores, experts))

    def _depends(self, wanted: bool) -> bool:
        return False

    def end(self) -> torch.Tensor:
        return self._sum.normed(self._emb.final_norm)
