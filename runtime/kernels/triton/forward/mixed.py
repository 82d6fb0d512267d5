"""The tokens of a launch with prompt chunks on their way through the layers: decode rows and chunks together."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.layers import Attention, Dense, EmbeddingAndHead, Ungated
from runahead.runtime.kernels.triton.attention.decode import decode_attention
from runahead.runtime.kernels.triton.attention.ragged import ChunkAttention
from runahead.runtime.kernels.triton.attention.schedule import begin_decode
from runahead.runtime.kernels.triton.forward.buffers import DecodeBuffers
from runahead.runtime.kernels.triton.forward.decode import FusedRows
from runahead.runtime.kernels.triton.forward.recurrent import (
    Recurrent,
    States,
    chunk_rows,
    of_any_tokens,
    states_in,
)
from runahead.runtime.kernels.triton.forward.separate_products import Squares
from runahead.runtime.kernels.triton.forward.unfused_products import scores_of, with_shared
from runahead.runtime.kernels.triton.gemm.cublaslt import cublaslt_product
from runahead.runtime.kernels.triton.gemm.tuning import mixed_plan
from runahead.runtime.kernels.triton.moe.layer import PackedExperts, live_tokens
from runahead.runtime.kernels.triton.ops import embedding
from runahead.runtime.kernels.triton.ops.activation import gated_mul, squared_relu_of
from runahead.runtime.kernels.triton.ops.gates import logistic_mul
from runahead.runtime.kernels.triton.ops.norms import LateSum, norm_across_heads
from runahead.runtime.kernels.triton.recurrent.scan import ChunkRows


class ManyRows:
    """A mixed launch: every token is a row of the vendor's products, and attention alone looks at the kind of row.

    Rows with one query token go through the split-KV kernel of decode launches, the others through that of chunks."""

    def __init__(self, batch: ForwardBatch, cache: KVCache, emb: EmbeddingAndHead, buffers: DecodeBuffers) -> None:
        self._batch, self._cache, self._emb, self._buffers = batch, cache, emb, buffers
        self._decodes: MixedDecodes | None = None
        chunks = batch
        if batch.num_rows > 1 and buffers.attentions:
            self._decodes = MixedDecodes(batch, cache, emb, buffers)
            chunks = replace(batch, seq_lens=self._decodes.chunk_lens)
            residual = self._decodes.residual
        else:
            residual = embedding.embed(batch.token_ids, emb.embedding, emb.embedding_scale)
        self._attention = ChunkAttention(chunks, cache, emb.ropes)
        self._sum = LateSum(residual)

    def attention(self, weights: Attention, place: int) -> None:
        x = self._sum.normed(weights.norm)
        qkv = cublaslt_product(x, weights.qkv)
        weights = norm_across_heads(qkv, weights)
        attended = self._attention.attended(qkv, weights, place)
        if self._decodes is not None:
            self._decodes.attend(qkv, attended, weights, place)
        if weights.gate is not None:
            logistic_mul(attended, cublaslt_product(x, weights.gate))
        self._sum.add(cublaslt_product(attended, weights.o), weights.post_norm)

    def recurrent(self, weights: Recurrent, place: int) -> None:
        projected = cublaslt_product(self._sum.normed(weights.norm), weights.proj)
        mixed, _ = of_any_tokens(projected, weights, states_in(self._cache, place), self._rows, self._buffers)
        self._sum.add(cublaslt_product(mixed, weights.out))

    def dense(self, weights: Dense) -> None:
        gate_up = cublaslt_product(self._sum.normed(weights.norm), weights.gate_up)
        gated = gated_mul(gate_up, weights.activation)
        self._sum.add(cublaslt_product(gated, weights.down), weights.post_norm)

    def ungated(self, weights: Ungated) -> None:
        squared = squared_relu_of(cublaslt_product(self._sum.normed(weights.norm), weights.up))
        self._sum.add(cublaslt_product(squared, weights.down))

    def experts(self, experts: PackedExperts) -> None:
        x = self._sum.normed(experts.weights.norm)
        scores = scores_of(x, experts.router)
        arrived = self._buffers.arrived(x.device)
        made = experts.made(experts.results(x, scores, self._live, arrived), self._live)
        self._sum.add(with_shared(x, made, scores, experts))

    def copy_residual(self, out: torch.Tensor) -> None:
        """See `RowStream.copy_residual`."""
        out.copy_(self._sum.whole())

    @cached_property
    def _live(self) -> torch.Tensor:
        return live_tokens(self._batch)

    @cached_property
    def _rows(self) -> ChunkRows:
        return chunk_rows(self._batch, self._emb.embedding.dtype)

    def end(self) -> torch.Tensor:
        return self._sum.normed(self._emb.final_norm)


class MixedDecodes:
    """The decode rows of a mixed launch: their attention, by the kernel of decode launches.

    residual: [T, hidden], all of the launch's tokens embedded. chunk_lens: int32 [R], the other rows' lengths; 0 of
    decode rows.
    """

    def __init__(self, batch: ForwardBatch, cache: KVCache, emb: EmbeddingAndHead, buffers: DecodeBuffers) -> None:
        self._batch, self._cache, self._ropes, self._buffers = batch, cache, emb.ropes, buffers
        self._plan = mixed_plan(buffers.widest_head, batch.seq_lens.device)
        self.residual = emb.embedding.new_empty((batch.num_tokens, emb.embedding.shape[1]))
        self.chunk_lens = torch.empty_like(batch.seq_lens)
        self._work = begin_decode(
            batch.token_ids, emb.embedding, self.residual, batch.seq_lens,
            buffers.windows(batch.seq_lens.device), self._plan, scale=emb.embedding_scale,
            query_start_loc=batch.query_start_loc, chunk_lens=self.chunk_lens,
        )  # fmt: skip

    def attend(self, qkv: torch.Tensor, out: torch.Tensor, weights: Attention, place: int) -> None:
        """Write the decode rows' keys and values into the cache and their results into `out`, [T, heads * D].

        qkv: contiguous [T, (heads + 2 * kv_heads) * D], neither normalized by head nor rotated. place: of the layer's
        keys and values.
        """
        batch, shape = self._batch, weights.shape
        kind = self._buffers.kind(shape, weights.window)
        decode_attention(
            qkv, out, self._cache.keys[place], self._cache.values[place], batch.block_tables, batch.seq_lens,
            self._work.items[kind], self._work.total[kind], self._ropes[weights.rope], weights, self._plan,
            self._buffers.parts(shape, batch, self._plan), dependent=False, query_start_loc=batch.query_start_loc,
            ragged=True,
        )  # fmt: skip


class ExactMixedRows(FusedRows):
    """A mixed launch by the exact kernels. Every token is a row of its products; the attention and the states of decode
    rows are computed as in a decode launch, those of chunks in tiles whose boundaries are the same for every chunk."""

    def __init__(self, batch: ForwardBatch, cache: KVCache, emb: EmbeddingAndHead, buffers: DecodeBuffers) -> None:
        super().__init__(batch, cache, emb, buffers, exact=True)
        chunks = batch
        if batch.num_rows > 1 and buffers.attentions:
            self._chunk_lens = torch.empty_like(batch.seq_lens)
            chunks = replace(batch, seq_lens=self._chunk_lens)
        else:
            self._windows = self._windows[:0]  # nothing is cut into items of decode attention
        self._attention = ChunkAttention(chunks, cache, emb.ropes, exact=True)
        # Attention's results by their size, for every layer: nobody writes the rows of padding, which stay zero.
        self._results: dict[int, torch.Tensor] = {}

    def _attended(self, qkv: torch.Tensor, weights: Attention, place: int) -> torch.Tensor:
        size = weights.shape.q_size
        if size not in self._results:
            self._results[size] = qkv.new_zeros((self._rows, size))
        out = self._results[size]
        self._attention.attended(qkv, weights, place, out)
        if self._chunk_lens is not None:
            self._attend(qkv, out, weights, place, self._buffers.kind(weights.shape, weights.window), False)
        return out

    def _mixed(
        self, projected: torch.Tensor, weights: Recurrent, states: States, squares: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Squares]:
        return of_any_tokens(projected, weights, states, self._chunk_rows, self._buffers, squares)

    @cached_property
    def _chunk_rows(self) -> ChunkRows:
        return chunk_rows(self._batch, self._emb.embedding.dtype)

    def _depends(self, wanted: bool) -> bool:
        return False
