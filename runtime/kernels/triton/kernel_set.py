"""The kernel set of CUDA: Triton kernels, and the vendor's matrix products through torch for more than one row."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.forward_batch import ForwardBatch, KVCache
from runtime.kernels.kernel_set import AttentionLayer, AttentionShape, ForwardAttention, RopeTable
from runtime.kernels.triton import activation, embedding, norms
from runtime.kernels.triton.chunk_attention import chunk_attention
from runtime.kernels.triton.decode_attention import decode_attention
from runtime.kernels.triton.gemv import gemv
from runtime.kernels.triton.rotary import rotate_and_write


class TritonAttention:
    """Attention of one forward: split over the context where every row has one query, tiled by queries otherwise."""

    def __init__(self, batch: ForwardBatch, cache: KVCache, shape: AttentionShape, rope: RopeTable) -> None:
        self._batch = batch
        self._cache = cache
        self._shape = shape
        self._rope = rope

    def attend(self, layer: AttentionLayer, qkv: torch.Tensor) -> torch.Tensor:
        """As `ForwardAttention.attend`. Never waits for the device: lengths and tables are read there."""
        batch, shape = self._batch, self._shape
        keys, values = self._cache.keys[layer.index], self._cache.values[layer.index]
        q = rotate_and_write(
            qkv,
            self._rope.cos,
            self._rope.sin,
            batch.positions,
            batch.slot_mapping,
            keys,
            values,
            shape.heads,
            layer.q_norm,
            layer.k_norm,
            shape.norm_eps,
        )
        if batch.is_decode:
            out = decode_attention(
                q, keys, values, batch.block_tables, batch.seq_lens, shape.scale, layer.window, batch.max_seq_len
            )
        else:
            longest = batch.num_tokens - batch.num_rows + 1
            out = chunk_attention(
                q,
                keys,
                values,
                batch.block_tables,
                batch.seq_lens,
                batch.query_start_loc,
                longest,
                shape.scale,
                layer.window,
            )
        return out.view(qkv.shape[0], shape.q_size)


class TritonKernelSet:
    """A `runtime.kernels.kernel_set.KernelSet` for CUDA tensors. float32 products are true float32, not tf32."""

    @property
    def row_multiple(self) -> int:
        return 1

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.contiguous()

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return embedding.embed(token_ids, table)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return gemv(x, weight, bias) if x.shape[0] == 1 else F.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norms.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norms.add_rms_norm(x, residual, weight, eps), residual

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return activation.silu_mul(gate_up)

    def begin(self, batch: ForwardBatch, cache: KVCache, shape: AttentionShape, rope: RopeTable) -> ForwardAttention:
        return TritonAttention(batch, cache, shape, rope)
