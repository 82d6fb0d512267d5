"""The tokens of a launch with prompt chunks on their way through the layers: decode rows and chunks together."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.layers import Attention, EmbeddingAndHead
from runahead.runtime.kernels.triton.attention.ragged import ChunkAttention
from runahead.runtime.kernels.triton.forward.buffers import DecodeBuffers
from runahead.runtime.kernels.triton.forward.decode import RowStream
from runahead.runtime.kernels.triton.forward.recurrent import Recurrent, States, of_any_tokens
from runahead.runtime.kernels.triton.gemm.epilogue import Squares
from runahead.runtime.kernels.triton.recurrent.scan import ChunkRows, length_of_sub_chunks


class MixedRows(RowStream):
    """A mixed launch. Every token is a row of its products. Attention and states of decode rows are computed as in a
    decode launch, and of chunks in tiles whose boundaries are the same for every chunk."""

    def __init__(self, batch: ForwardBatch, cache: KVCache, emb: EmbeddingAndHead, buffers: DecodeBuffers) -> None:
        super().__init__(batch, cache, emb, buffers)
        chunks = batch
        if batch.num_rows > 1 and buffers.attentions:
            self._chunk_lens = torch.empty_like(batch.seq_lens)
            chunks = replace(batch, seq_lens=self._chunk_lens)
        else:
            self._windows = self._windows[:0]  # nothing is cut into items of decode attention
        self._attention = ChunkAttention(chunks, cache, emb.ropes)
        # Attention's results by their size, for every layer: nobody writes the rows of padding, which stay zero.
        self._results: dict[int, torch.Tensor] = {}

    def _attended(self, qkv: torch.Tensor, weights: Attention, cache_index: int) -> torch.Tensor:
        size = weights.shape.q_size
        if size not in self._results:
            self._results[size] = qkv.new_zeros((self._rows, size))
        out = self._results[size]
        self._attention.attended(qkv, weights, cache_index, out)
        if self._chunk_lens is not None:
            kind = self._buffers.kind(weights.shape, weights.window)
            self._attend(qkv, out, weights, cache_index, kind, self._depends(True))
        return out

    def _mixed(
        self, projected: torch.Tensor, weights: Recurrent, states: States, squares: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Squares]:
        return of_any_tokens(projected, weights, states, self._chunk_rows, self._buffers, squares)

    @cached_property
    def _chunk_rows(self) -> ChunkRows:
        """The rows with several query tokens, once for all layers."""
        return ChunkRows(self._batch, length_of_sub_chunks(self._emb.embedding.dtype))
