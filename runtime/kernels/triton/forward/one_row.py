"""A decode launch of one row on its way through the layers, by the fastest kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.layers import Activation, EmbeddingAndHead, Linear, Norm
from runahead.runtime.kernels.triton.forward.buffers import DecodeBuffers
from runahead.runtime.kernels.triton.forward.decode import RowStream
from runahead.runtime.kernels.triton.forward.recurrent import Recurrent, States, norm_left, of_decode_rows
from runahead.runtime.kernels.triton.forward.unfused_products import sizes_of
from runahead.runtime.kernels.triton.gemm.gemv import ADD, EPILOGUES, STORE, gemv_product
from runahead.runtime.kernels.triton.gemm.tuning import row_tiling
from runahead.runtime.kernels.triton.moe.layer import PackedExperts
from runahead.runtime.kernels.triton.ops import norms


class OneRow(RowStream):
    """A launch of one row: products by multiply-adds, each norm in the product that reads it. joins: see
    `TritonBoundKernels.stream`."""

    def __init__(
        self, batch: ForwardBatch, cache: KVCache, emb: EmbeddingAndHead, buffers: DecodeBuffers, joins: bool = False
    ) -> None:
        super().__init__(batch, cache, emb, buffers)
        self._work = self._begin(embeds=not joins)

    def _normed_product(
        self, norm: Norm | None, linear: Linear, epilogue: int, activation: Activation = "silu"
    ) -> torch.Tensor:
        out = self._empty(linear, epilogue)
        self._product(self._residual, linear, norm, out, epilogue, activation)
        return out

    def _mix(self, projected: torch.Tensor, weights: Recurrent, states: States) -> None:
        norm = norm_left(weights)
        mixed, _ = of_decode_rows(
            projected, weights, states, self._batch, self._buffers, normed=norm is None, dependent=self._depends(True)
        )
        self._product(mixed, weights.out, norm, self._residual, ADD)

    def _stored(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> torch.Tensor:
        self._product(x, linear, None, out, STORE)
        return out

    def _add(self, x: torch.Tensor, linear: Linear, post_norm: Norm | None) -> None:
        if post_norm is None:
            self._product(x, linear, None, self._residual, ADD)
            return
        norms.add_normed(self._stored(x, linear, self._empty(linear, STORE)), self._residual, post_norm)

    def left(self) -> torch.Tensor:
        return self._residual

    def experts(self, experts: PackedExperts) -> None:
        scores = torch.empty((1, experts.scored), dtype=torch.float32, device=self._device)
        self._product(self._residual, experts.router, experts.weights.norm, scores, STORE)
        experts.add_of_one_row(self._residual, scores, self._live, dependent=self._depends(True))

    def _product(
        self, x: torch.Tensor, linear: Linear, norm: Norm | None, out: torch.Tensor, epilogue: int,
        activation: Activation = "silu",
    ) -> None:  # fmt: skip
        tiling = row_tiling(*sizes_of(linear.weight), EPILOGUES[epilogue])
        tiling = replace(tiling, dependent=self._depends(tiling.dependent))
        gemv_product(x, linear, norm, out, epilogue, tiling, activation=activation)
