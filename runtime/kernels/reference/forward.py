"""The CPU's reference kernel set, also the oracle of all others.

Products and attention are torch's, the operations between them NumPy's (`ops` says why). Arithmetic is float32 for
every dtype of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.activations import is_gelu_tanh
from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.layers import (
    Attention,
    AttentionShape,
    Dense,
    EmbeddingAndHead,
    Experts,
    Fuse,
    GatedDelta,
    Linear,
    Mamba2,
    Norm,
    Ungated,
)
from runahead.runtime.kernels.reference.attention import (
    AttentionPlan,
    KeptPlans,
    LayerCache,
    attend,
    blocks_read,
    layer_caches,
    silence_sparse_warning,
)
from runahead.runtime.kernels.reference.experts import BoundExperts, ExpertBuffers, live_tokens
from runahead.runtime.kernels.reference.gated_delta import BoundDelta
from runahead.runtime.kernels.reference.linear import Product, Products, bound_product, choose_products, linear
from runahead.runtime.kernels.reference.mamba2 import BoundMamba2
from runahead.runtime.kernels.reference.ops import (
    AttentionBuffers,
    Buffers,
    DenseBuffers,
    NormWeight,
    RmsNorm,
    UngatedBuffers,
    bound,
    gelu_mul,
    logistic_mul,
    rope_factors,
    silu_mul,
    squared_relu,
)
from runahead.runtime.kernels.reference.recurrence import RecurrentBuffers, RowTokens, row_tokens_of

# buffers of forwards up to this length, such as decode steps, are kept: one set for each length
_KEPT_TOKENS: Final = 64
_NOBODY: Final = np.zeros(0, np.intp)
_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class _Workspace:
    """Buffers for a number of tokens, of all layers and of each kind of layer."""

    buffers: Buffers
    attention: tuple[AttentionBuffers, ...]
    of_kinds: tuple[Any, ...]  # of other layers than attention, and [T, heads * head_dim] of gates


@dataclass(frozen=True, slots=True)
class ReferenceStream:
    """A batch's tokens on their way through the layers."""

    num_tokens: int  # without padding
    work: _Workspace
    caches: tuple[LayerCache, ...]
    blocks: NDArray[np.int64]  # read by attention, if they are dequantized first
    plans: tuple[AttentionPlan, ...]  # by number
    live: NDArray[np.intp]  # tokens of live rows; empty if no layer needs them
    runs: RowTokens | None  # tokens of live rows with the rows' states; None if no layer has states
    states: tuple[list[NDArray[np.float32]], ...]  # of each recurrent mixer, with the saved inputs of runs
    joined: list[torch.Tensor]  # the output of `Fuse`, split for a product; empty before


class ReferenceBoundKernels:
    """`BoundKernels` of the reference. Reads the batch's lengths and tables on the host.

    Equal layers share buffers, and equal attention layers share a plan: each kind has a number.
    """

    def __init__(self, emb: EmbeddingAndHead, products: Products) -> None:
        self._products = products
        self._embedding: NDArray[np.float32] = emb.embedding.float().numpy()
        self._ranks = emb.ranks
        self._final_norm = NormWeight.of(emb.final_norm)
        self._embedding_scale = emb.embedding_scale
        self._ropes = tuple(map(rope_factors, emb.ropes))
        self._shapes: list[tuple[AttentionShape, int]] = []  # a shape and the index of its rope
        self._windows: list[tuple[int, int, int]] = []  # the number of these, a window, and `Attention.first`
        self._kinds: dict[Hashable, tuple[int, Callable[[int], Any]]] = {}  # numbers, and what makes buffers for T
        self._has_experts = self._has_states = False
        self._work: dict[int, _Workspace] = {}  # by T
        self._cache: tuple[KVCache, tuple[LayerCache, ...]] | None = None
        self._plans = KeptPlans()

    def attention(self, weights: Attention, cache_index: int) -> Callable[[ReferenceStream], None]:
        """See `BoundKernels.attention`."""
        shape = _number(self._shapes, (weights.shape, weights.rope))
        plan = _number(self._windows, (shape, weights.window, weights.first))
        keep, o, post_norm = self.keep(weights, cache_index), self._bound(weights.o), _weight_of(weights.post_norm)
        cut, cap, scales = self._products.cut, weights.score_cap, weights.kv_scales
        gate = None if weights.gate is None else self._bound(weights.gate)
        width = weights.shape.q_size
        gates = 0 if gate is None else self._kind((Attention, width), lambda tokens: torch.zeros((tokens, width)))

        def mix(stream: ReferenceStream) -> None:
            keep(stream)
            buffers, own, cache = stream.work.buffers, stream.work.attention[shape], stream.caches[cache_index]
            attended = attend(stream.plans[plan], own.heads, *cache.read(stream.blocks, scales), cap)
            if gate is not None:
                gated: torch.Tensor = stream.work.of_kinds[gates]
                gate.write(buffers.residual_parts if weights.norm is None else buffers.normed_parts, gated)
                logistic_mul(gated.numpy(), attended.numpy())
            self._add(o, cut(attended), buffers, post_norm)

        return mix

    def keep(self, weights: Attention, cache_index: int) -> Callable[[ReferenceStream], None]:
        """See `DraftKernels.keep`."""
        shape = _number(self._shapes, (weights.shape, weights.rope))
        qkv, norm = self._bound(weights.qkv), _weight_of(weights.norm)
        q_norm, k_norm, spans = _weight_of(weights.q_norm), _weight_of(weights.k_norm), weights.norms_span_heads

        def write(stream: ReferenceStream) -> None:
            buffers, own, cache = stream.work.buffers, stream.work.attention[shape], stream.caches[cache_index]
            qkv.write(tuple(stream.joined) if weights.joined else _normed(buffers, norm), own.qkv)
            if q_norm is not None and k_norm is not None:
                (own.whole_q_norm if spans else own.q_norm).apply(q_norm)
                (own.whole_k_norm if spans else own.k_norm).apply(k_norm)
            own.rotation.apply()
            cache.write(buffers.slots, own.k, own.v, weights.kv_scales)

        return write

    def mamba2(self, weights: Mamba2, cache_index: int) -> Callable[[ReferenceStream], None]:
        """See `BoundKernels.mamba2`."""
        return self._recurrent(weights, BoundMamba2.of(weights, self._products), cache_index)

    def gated_delta(self, weights: GatedDelta, cache_index: int) -> Callable[[ReferenceStream], None]:
        """See `BoundKernels.gated_delta`."""
        return self._recurrent(weights, BoundDelta.of(weights, self._products), cache_index)

    def _recurrent(
        self, weights: Mamba2 | GatedDelta, bound: BoundMamba2 | BoundDelta, index: int
    ) -> Callable[[ReferenceStream], None]:
        self._has_states, norm, products = True, NormWeight.of(weights.norm), self._products
        kind = self._kind(weights.shape, lambda tokens: RecurrentBuffers.make(tokens, weights, products))

        def mix(stream: ReferenceStream) -> None:
            buffers, runs = stream.work.buffers, stream.runs
            assert runs is not None
            buffers.norm.apply(norm)
            y = bound.mix(buffers.normed_parts, stream.work.of_kinds[kind], runs, stream.states[index])
            self._add(bound.out, y, buffers)

        return mix

    def dense(self, weights: Dense) -> Callable[[ReferenceStream], None]:
        """See `BoundKernels.dense`."""
        width, products = weights.gate_up.weight.shape[0] // 2, self._products
        kind = self._kind((Dense, width), lambda tokens: DenseBuffers.make(tokens, width, products))
        gate_up, down = self._bound(weights.gate_up), self._bound(weights.down)
        norm, post_norm = _weight_of(weights.norm), _weight_of(weights.post_norm)
        gated_mul = gelu_mul if is_gelu_tanh(weights.activation) else silu_mul

        def feed_forward(stream: ReferenceStream) -> None:
            buffers, own = stream.work.buffers, stream.work.of_kinds[kind]
            gate_up.write(_normed(buffers, norm), own.gate_up)
            gated_mul(own.gate, own.up, own.gated)
            self._add(down, own.gated_parts, buffers, post_norm)

        return feed_forward

    def ungated(self, weights: Ungated) -> Callable[[ReferenceStream], None]:
        """See `BoundKernels.ungated`."""
        width, products = weights.up.weight.shape[0], self._products
        kind = self._kind((Ungated, width), lambda tokens: UngatedBuffers.make(tokens, width, products))
        norm, up, down = NormWeight.of(weights.norm), self._bound(weights.up), self._bound(weights.down)

        def feed_forward(stream: ReferenceStream) -> None:
            buffers, own = stream.work.buffers, stream.work.of_kinds[kind]
            buffers.norm.apply(norm)
            up.write(buffers.normed_parts, own.up)
            squared_relu(own.up_array)
            self._add(down, own.up_parts, buffers)

        return feed_forward

    def experts(self, weights: Experts) -> Callable[[ReferenceStream], None]:
        """See `BoundKernels.experts`."""
        self._has_experts, hidden = True, self._embedding.shape[1]
        sizes = weights.count, weights.width, 0 if weights.shared is None else weights.shared.width, weights.activation
        kind = self._kind((Experts, *sizes), lambda tokens: ExpertBuffers.make(tokens, hidden, *sizes))
        norm, bound = NormWeight.of(weights.norm), BoundExperts.of(weights, self._products)

        def feed_forward(stream: ReferenceStream) -> None:
            buffers = stream.work.buffers
            buffers.norm.apply(norm)
            bound.write(buffers, stream.work.of_kinds[kind], stream.live)
            self._add_branch(buffers)

        return feed_forward

    def fuse(self, weights: Fuse) -> Callable[[ReferenceStream, torch.Tensor], None]:
        """See `DraftKernels.fuse`."""
        product, cut = None if weights.product is None else self._bound(weights.product), self._products.cut
        token_norm, hidden_norm = _weight_of(weights.token_norm), _weight_of(weights.hidden_norm)

        def fuse(stream: ReferenceStream, hidden: torch.Tensor) -> None:
            buffers, count, width = stream.work.buffers, stream.num_tokens, hidden.shape[1]
            residual = buffers.residual_array
            joined = np.zeros((buffers.tokens, residual.shape[1] + width), np.float32)
            cuts = (width,) if weights.hidden_first else (residual.shape[1],)
            token, before = np.split(joined, cuts, axis=1)[:: -1 if weights.hidden_first else 1]
            token[:] = residual
            before[:count] = hidden.numpy()
            for part, norm in ((token, token_norm), (before, hidden_norm)):
                if norm is not None:
                    RmsNorm.of(part, part).apply(norm)
            stream.joined[:] = cut(torch.from_numpy(joined))
            if product is None:
                residual[:count] = before[:count] if weights.normed_residual else hidden.numpy()
            else:
                product.write(tuple(stream.joined), buffers.residual)

        return fuse

    def residual(self, stream: ReferenceStream) -> torch.Tensor:
        """See `DraftKernels.residual`."""
        return torch.from_numpy(stream.work.buffers.residual_array[: stream.num_tokens].copy())

    @contextmanager
    def stream(self, batch: ForwardBatch, cache: KVCache) -> Iterator[ReferenceStream]:
        """See `BoundKernels.stream`."""
        work = self._work_for(batch.num_tokens)
        caches = self._caches_of(cache)
        buffers = work.buffers
        with np.errstate(all="ignore"):  # a NaN or an infinity stays in its row, and is found in the row's logits
            buffers.take(batch)
            self._embed(buffers)
            if self._embedding_scale != 1.0:
                np.multiply(buffers.residual_array, np.float32(self._embedding_scale), out=buffers.residual_array)
            for own, (_, rope) in zip(work.attention, self._shapes, strict=True):
                own.rotation.turn_to(self._ropes[rope], buffers.positions)
            plans = self._plan(batch, buffers.tokens, cache)
            live = live_tokens(batch) if self._has_experts else _NOBODY
            runs = row_tokens_of(batch) if self._has_states else None
            kept = zip(cache.states, cache.runs, strict=True)
            states = tuple([tensor.numpy() for tensor in (*each, run)] for each, run in kept)
            blocks = blocks_read(batch, cache)
            yield ReferenceStream(batch.num_tokens, work, caches, blocks, plans, live, runs, states, [])

    def end(self, stream: ReferenceStream) -> torch.Tensor:
        """See `BoundKernels.end`."""
        norm = stream.work.buffers.norm
        norm.apply(self._final_norm)
        return torch.from_numpy(norm.out[: stream.num_tokens].copy())

    def _kind(self, key: Hashable, make: Callable[[int], Any]) -> int:
        """Return the number of a kind of layers, which share buffers. make: makes its buffers for T tokens."""
        return self._kinds.setdefault(key, (len(self._kinds), make))[0]

    def _bound(self, linear: Linear) -> Product:
        return bound_product(self._products, linear)

    def _embed(self, buffers: Buffers) -> None:
        """Look up embeddings; a rank has its part of the table, and zeros for other tokens."""
        buffers.embed(self._embedding, self._ranks.shard)
        self._ranks.reduce(buffers.residual)

    def _add(
        self, product: Product, x: tuple[torch.Tensor, ...], buffers: Buffers, post_norm: NormWeight | None = None
    ) -> None:
        """Add a layer's last product to the residual, after the sum over ranks and `post_norm`."""
        if post_norm is None and self._ranks.shard.is_whole:
            product.add(x, buffers.residual)
            return
        product.write(x, buffers.branch)
        self._add_branch(buffers, post_norm)

    def _add_branch(self, buffers: Buffers, post_norm: NormWeight | None = None) -> None:
        """Add the branch to the residual, after the sum over ranks and `post_norm`."""
        self._ranks.reduce(buffers.branch)
        if post_norm is not None:
            buffers.branch_norm.apply(post_norm)
        np.add(buffers.residual_array, buffers.branch_array, out=buffers.residual_array)

    def _plan(self, batch: ForwardBatch, tokens: int, cache: KVCache) -> tuple[AttentionPlan, ...]:
        if not self._windows:
            return ()  # without attention layers the cache has no KV slots to plan for
        slots = cache.keys[0].shape[0] * cache.block_size
        shapes = [(self._shapes[number][0], window, first) for number, window, first in self._windows]
        return self._plans.make(batch, tokens, shapes, slots, cache.block_size)

    def _work_for(self, num_tokens: int) -> _Workspace:
        tokens = num_tokens + -num_tokens % self._products.row_multiple
        work = self._work.get(tokens)
        if work is None:
            work = _Workspace(
                Buffers.make(tokens, self._embedding.shape[1], self._products),
                tuple(AttentionBuffers.make(tokens, shape) for shape, _ in self._shapes),
                tuple(make(tokens) for _, make in self._kinds.values()),
            )
            if tokens <= _KEPT_TOKENS:
                self._work[tokens] = work
        return work

    def _caches_of(self, cache: KVCache) -> tuple[LayerCache, ...]:
        if self._cache is None or self._cache[0] is not cache:
            self._plans = KeptPlans()  # plans depend on the number of KV slots
            self._cache = (cache, layer_caches(cache))
        return self._cache[1]


class ReferenceKernels:
    """`KernelSet` of the CPU. A row's bits depend on that row only.

    products: None chooses row-invariant ones for this machine.
    """

    def __init__(self, products: Products | None = None) -> None:
        silence_sparse_warning()
        self._products = choose_products() if products is None else products

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Keys and values are kept in float32: attention is computed in it."""
        return torch.float32

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return self._products.pack(weight)

    def bound(self, logits: torch.Tensor, cap: float) -> None:
        bound(logits.numpy(), cap)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(self._products, x.float(), weight, bias)

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        found = np.empty(tuple(x.shape), np.float32)
        RmsNorm.of(x.numpy(), found).apply(NormWeight.of(norm))
        return torch.from_numpy(found)

    def logits_into(
        self, hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, targets: torch.Tensor, cap: float = 0.0
    ) -> None:
        found = self.linear(hidden, weight)
        out[targets.long()] = torch.from_numpy(bound(found.numpy(), cap)) if cap else found

    def bind(self, emb: EmbeddingAndHead) -> ReferenceBoundKernels:
        return ReferenceBoundKernels(emb, self._products)


def _weight_of(norm: Norm | None) -> NormWeight | None:
    return None if norm is None else NormWeight.of(norm)


def _normed(buffers: Buffers, norm: NormWeight | None) -> tuple[torch.Tensor, ...]:
    """Return the input of a layer's first product: the residual's norm, or the residual."""
    if norm is None:
        return buffers.residual_parts
    buffers.norm.apply(norm)
    return buffers.normed_parts


def _number(kinds: list[_Kind], kind: _Kind) -> int:
    """Return the index of `kind` in the list, appending it if it is new."""
    if kind not in kinds:
        kinds.append(kind)
    return kinds.index(kind)
