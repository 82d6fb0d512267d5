"""The reference kernel set: the CPU's own, the fast path there and the oracle everywhere.

Products and attention are torch's, what lies between them is NumPy's (`norm` says why). Arithmetic is float32 whatever
the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.cuda_graphs.enqueue_watch import unwatched
from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.kernel_set import Layers, LayerWeights
from runahead.runtime.kernels.reference.attention import AttentionPlan, attend, plan_attention, silence_sparse_warning
from runahead.runtime.kernels.reference.buffers import Buffers, Sizes
from runahead.runtime.kernels.reference.linear import Product, Products, choose_products, linear
from runahead.runtime.kernels.reference.norm import silu_mul
from runahead.runtime.kernels.reference.rope import rope_factors

_KEPT_TOKENS: Final = 64  # buffers of forwards up to this long are kept, one set a length: those of decode steps


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's weights as the kernels read them."""

    window: int
    input_norm: NDArray[np.float32]
    qkv: Product
    q_norm: NDArray[np.float32] | None
    k_norm: NDArray[np.float32] | None
    o: Product
    post_norm: NDArray[np.float32]
    gate_up: Product
    down: Product

    @staticmethod
    def of(weights: LayerWeights, window: int, products: Products) -> _Layer:
        return _Layer(
            window,
            _array(weights.input_norm),
            products.bind(weights.qkv, weights.qkv_bias),
            None if weights.q_norm is None else _array(weights.q_norm),
            None if weights.k_norm is None else _array(weights.k_norm),
            products.bind(weights.o, weights.o_bias),
            _array(weights.post_norm),
            products.bind(weights.gate_up, weights.gate_up_bias),
            products.bind(weights.down, weights.down_bias),
        )


@dataclass(frozen=True, slots=True)
class _LayerCache:
    """A layer's keys and values as the kernels write and read them."""

    keys_by_slot: NDArray[np.float32]  # [slots, kv_heads, head_dim]
    values_by_slot: NDArray[np.float32]
    keys_by_dim: torch.Tensor  # [head_dim, slots * kv_heads]
    values_by_head: torch.Tensor  # [slots * kv_heads, head_dim]

    @staticmethod
    def of(keys: torch.Tensor, values: torch.Tensor) -> _LayerCache:
        by_slot, head_dim = (-1, *keys.shape[2:]), keys.shape[-1]
        return _LayerCache(
            keys.view(by_slot).numpy(),
            values.view(by_slot).numpy(),
            keys.view(-1, head_dim).t(),
            values.view(-1, head_dim),
        )


class ReferenceLayers:
    """`BoundLayers` of the reference. Reads the batch's lengths and tables on the host."""

    def __init__(self, model: Layers, products: Products) -> None:
        layers = zip(model.layers, model.windows, strict=True)
        self._layers = tuple(_Layer.of(weights, window, products) for weights, window in layers)
        self._embedding = _array(model.embedding)
        self._final_norm = _array(model.final_norm)
        self._rope = rope_factors(model.rope)
        self._products = products
        intermediate = model.layers[0].gate_up.shape[0] // 2
        self._sizes = Sizes(model.shape, model.embedding.shape[1], intermediate, model.norm_eps)
        self._buffers: dict[int, Buffers] = {}  # by T
        self._cache: tuple[KVCache, tuple[_LayerCache, ...]] | None = None
        self._plans: dict[int, AttentionPlan] = {}  # by window, of the forward before

    def forward(self, batch: ForwardBatch, cache: KVCache, between: Callable[[], None] = unwatched) -> torch.Tensor:
        """See `BoundLayers.forward`."""
        buffers = self._buffers_for(batch.num_tokens)
        caches = self._caches_of(cache)
        with np.errstate(all="ignore"):  # numbers that are none stay in their row, and are found in its logits
            buffers.take(batch)
            np.take(self._embedding, buffers.token_ids, axis=0, out=buffers.residual_array, mode="clip")
            buffers.rotation.turn_to(self._rope, buffers.positions)
            plans = self._plan(batch, buffers.tokens, cache)
            for layer, layer_cache in zip(self._layers, caches, strict=True):
                self._add_attention(buffers, layer, layer_cache, plans[layer.window])
                self._add_feed_forward(buffers, layer)
                between()
            buffers.norm.apply(self._final_norm)
        return torch.from_numpy(buffers.norm.out[: batch.num_tokens].copy())

    def _add_attention(self, buffers: Buffers, layer: _Layer, cache: _LayerCache, plan: AttentionPlan) -> None:
        buffers.norm.apply(layer.input_norm)
        layer.qkv.write(buffers.normed_parts, buffers.qkv)
        if layer.q_norm is not None and layer.k_norm is not None:
            buffers.q_norm.apply(layer.q_norm)
            buffers.k_norm.apply(layer.k_norm)
        buffers.rotation.apply()
        cache.keys_by_slot[buffers.slots] = buffers.k
        cache.values_by_slot[buffers.slots] = buffers.v
        attended = attend(plan, buffers.heads, cache.keys_by_dim, cache.values_by_head)
        layer.o.add(self._products.cut(attended), buffers.residual)

    def _add_feed_forward(self, buffers: Buffers, layer: _Layer) -> None:
        buffers.norm.apply(layer.post_norm)
        layer.gate_up.write(buffers.normed_parts, buffers.gate_up)
        silu_mul(buffers.gate, buffers.up, buffers.gated)
        layer.down.add(buffers.gated_parts, buffers.residual)

    def _plan(self, batch: ForwardBatch, tokens: int, cache: KVCache) -> dict[int, AttentionPlan]:
        """By window. Plans keep the buffers of the forward before where they fit."""
        shape, block_size = self._sizes.shape, cache.block_size
        slots, q_stride = cache.keys[0].shape[0] * block_size, shape.heads + 2 * shape.kv_heads
        for window in {layer.window for layer in self._layers}:
            self._plans[window] = plan_attention(
                batch, tokens, q_stride, shape, slots, block_size, window, self._plans.get(window)
            )
        return self._plans

    def _buffers_for(self, num_tokens: int) -> Buffers:
        tokens = num_tokens + -num_tokens % self._products.row_multiple
        buffers = self._buffers.get(tokens)
        if buffers is None:
            buffers = Buffers.make(tokens, self._sizes, self._products)
            if tokens <= _KEPT_TOKENS:
                self._buffers[tokens] = buffers
        return buffers

    def _caches_of(self, cache: KVCache) -> tuple[_LayerCache, ...]:
        if self._cache is None or self._cache[0] is not cache:
            self._plans.clear()  # they are made for a number of slots
            views = tuple(_LayerCache.of(*pair) for pair in zip(cache.keys, cache.values, strict=True))
            self._cache = (cache, views)
        return self._cache[1]


class ReferenceKernels:
    """`KernelSet` of the CPU. A row's bits depend on that row alone.

    products: None tries which ones keep their rows' bits on this machine.
    """

    def __init__(self, products: Products | None = None) -> None:
        silence_sparse_warning()
        self._products = choose_products() if products is None else products

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Keys and values are kept in float32: attention is computed in it."""
        return torch.float32

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return self._products.pack(weight)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(self._products, x.float(), weight, bias)

    def bind(self, layers: Layers) -> ReferenceLayers:
        return ReferenceLayers(layers, self._products)


def _array(tensor: torch.Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = tensor.float().numpy()
    return found
