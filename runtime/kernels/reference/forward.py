"""The reference kernel set: plain torch on the CPU, the fast path there and the oracle everywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.forward_batch import ForwardBatch, KVCache
from runtime.kernels.kernel_set import AttentionLayer, AttentionShape, RopeTable
from runtime.kernels.reference.attention import AttentionPlan, attend, plan_attention, silence_sparse_warning
from runtime.kernels.reference.linear import Products, choose_products
from runtime.kernels.reference.norm import add_rms_norm, rms_norm, silu_mul
from runtime.kernels.reference.rope import rope_at, rope_factors, rotate


@dataclass(frozen=True, slots=True)
class _CacheViews:
    """A cache as the kernels read and write it, by layer."""

    cache: KVCache
    keys_by_slot: tuple[torch.Tensor, ...]  # [slots, kv_heads, head_dim]
    values_by_slot: tuple[torch.Tensor, ...]
    keys_by_dim: tuple[torch.Tensor, ...]  # [head_dim, slots * kv_heads]
    values_by_head: tuple[torch.Tensor, ...]  # [slots * kv_heads, head_dim]

    @staticmethod
    def of(cache: KVCache) -> _CacheViews:
        head_dim = cache.keys[0].shape[-1]
        return _CacheViews(
            cache,
            tuple(keys.view(-1, *keys.shape[2:]) for keys in cache.keys),
            tuple(values.view(-1, *values.shape[2:]) for values in cache.values),
            tuple(keys.view(-1, head_dim).t() for keys in cache.keys),
            tuple(values.view(-1, head_dim) for values in cache.values),
        )


class ReferenceAttention:
    """`ForwardAttention` of the reference. Reads the batch's lengths and tables on the host."""

    def __init__(self, batch: ForwardBatch, views: _CacheViews, shape: AttentionShape, factors: torch.Tensor) -> None:
        self._batch = batch
        self._views = views
        self._shape = shape
        self._tokens = batch.token_ids.shape[0]  # T
        self._cos, self._sin = rope_at(factors, batch.positions)
        self._plans: dict[int, AttentionPlan] = {}  # by window

    def attend(self, layer: AttentionLayer, qkv: torch.Tensor) -> torch.Tensor:
        """See `ForwardAttention.attend`."""
        shape, views, slots = self._shape, self._views, self._batch.slot_mapping
        rotated = shape.heads + shape.kv_heads
        split = qkv.view(self._tokens, rotated + shape.kv_heads, shape.head_dim)
        q_and_k, v = split[:, :rotated], split[:, rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q_and_k[:, : shape.heads], layer.q_norm, shape.norm_eps)
            k = rms_norm(q_and_k[:, shape.heads :], layer.k_norm, shape.norm_eps)
            q_and_k = torch.cat((q, k), dim=1)
        q_and_k = rotate(q_and_k, self._cos, self._sin)
        keys, values = views.keys_by_slot[layer.index], views.values_by_slot[layer.index]
        keys.index_copy_(0, slots, q_and_k[:, shape.heads :].to(keys.dtype))
        values.index_copy_(0, slots, v.to(values.dtype))
        out = attend(
            self._plan(layer.window, q_stride=rotated),
            q_and_k.view(-1, shape.head_dim),
            views.keys_by_dim[layer.index].float(),
            views.values_by_head[layer.index].float(),
        )
        return out.to(qkv.dtype)

    def _plan(self, window: int, q_stride: int) -> AttentionPlan:
        plan = self._plans.get(window)
        if plan is None:
            slots, block_size = self._views.keys_by_slot[0].shape[0], self._views.cache.block_size
            plan = plan_attention(self._batch, self._tokens, q_stride, self._shape, slots, block_size, window)
            self._plans[window] = plan
        return plan


class ReferenceKernels:
    """`KernelSet` in plain torch. With float32 on the CPU a row's bits depend on that row alone.

    What a model's rotary table and cache look like to the kernels is kept from one forward to the next. products:
    None tries which ones keep their rows' bits on this machine.
    """

    def __init__(self, products: Products | None = None) -> None:
        silence_sparse_warning()
        self._products = choose_products() if products is None else products
        self._views: _CacheViews | None = None
        self._factors: tuple[RopeTable, torch.Tensor] | None = None

    @property
    def row_multiple(self) -> int:
        return self._products.row_multiple

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Keys and values are kept in float32: attention is computed in it."""
        return torch.float32

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return self._products.pack(weight)

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, token_ids)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._products.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up)

    def begin(self, batch: ForwardBatch, cache: KVCache, shape: AttentionShape, rope: RopeTable) -> ReferenceAttention:
        if self._views is None or self._views.cache is not cache:
            self._views = _CacheViews.of(cache)
        if self._factors is None or self._factors[0] is not rope:
            self._factors = (rope, rope_factors(rope))
        return ReferenceAttention(batch, self._views, shape, self._factors[1])
