"""Causal attention over a paged KV cache in torch, computed independently for each query head of each token.

Scores are a sampled product at the existing (query head, key) pairs: one dot product a pair, read in place from the
cache. The weighted sum of values is an embedding bag: one running sum for each query head, in the order of positions.
Neither gathers the cache nor depends on other rows, so chunks, neighbors, padding and threads change no bit. The
softmax between them runs over rows padded with keys of weight zero, which adds exact zeros.

A padding key names the token's newest key, never a slot beyond the row, which may hold NaN.

Consecutive decode steps differ little, so a plan reuses an earlier plan's buffers if they fit.

The cache is float32, or FP8 with a scale for each KV head: e4m3, a number stored as e4m3(number / scale), rounded to
nearest even, and read as e4m3 number * scale in float32. Finite numbers beyond 448 * scale saturate, others become NaN.
Products read only float32. So the blocks that a forward reads are first dequantized into memory that all layers of one
shape share, at the same block indexes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.layers import AttentionShape
from runahead.runtime.kernels.reference.ops import bound
from runahead.runtime.rounding import ceil_div

_FP8: Final = torch.float8_e4m3fn
_LARGEST: Final = np.float32(torch.finfo(_FP8).max)
_NUMBERS: Final = torch.arange(256, dtype=torch.uint8).view(_FP8).float().numpy()  # by their bits

# The softmax sums in vector lanes, key j in lane j modulo the vector width: rows are padded to a multiple of the
# widest.
_LANES = 16
# Most pairs of a segment, which bounds attention's memory beside the cache.
_MAX_PAIRS = 1 << 21
# Most pairs of all kept plans, if more than the newest one is kept.
_MAX_KEPT_PAIRS = 1 << 18


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The keys and values of one layer.

    keys, values: float32 [num_blocks, block_size, kv_heads, head_dim], read by attention. stored: their FP8 bits, keys
    then values, uint8 of the same shape; empty without FP8. by_head: views for attention's products: keys [head_dim, KV
    slots * kv_heads], values [KV slots * kv_heads, head_dim].
    """

    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    stored: tuple[NDArray[np.uint8], ...]
    by_head: tuple[torch.Tensor, torch.Tensor]

    def write(
        self, slots: NDArray[np.int64], k: NDArray[np.float32], v: NDArray[np.float32], scales: torch.Tensor | None
    ) -> None:
        """Store tokens. slots: [T] of the cache. k, v: [T, kv_heads, head_dim]. scales: float32 [2, kv_heads]; None
        without FP8."""
        if scales is None:
            _by_slot(self.keys)[slots] = k
            _by_slot(self.values)[slots] = v
            return
        for stored, numbers, scale in zip(self.stored, (k, v), scales.numpy(), strict=True):
            _by_slot(stored)[slots] = _quantized(numbers, scale[:, None])

    def read(self, blocks: NDArray[np.int64], scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values for attention: see `by_head`. blocks: the blocks to dequantize, each once."""
        if scales is not None:
            for stored, numbers, scale in zip(self.stored, (self.keys, self.values), scales.numpy(), strict=True):
                numbers[blocks] = _NUMBERS[stored[blocks]] * scale[:, None]
        return self.by_head


def layer_caches(cache: KVCache) -> tuple[LayerCache, ...]:
    """Make the caches of attention layers. Layers of one shape share the memory of dequantized blocks."""
    rooms: dict[torch.Size, tuple[torch.Tensor, torch.Tensor]] = {}
    found = []
    for keys, values in zip(cache.keys, cache.values, strict=True):
        stored: tuple[NDArray[np.uint8], ...] = ()
        if keys.dtype == _FP8:
            stored = (keys.view(torch.uint8).numpy(), values.view(torch.uint8).numpy())
            if keys.shape not in rooms:
                rooms[keys.shape] = torch.empty(keys.shape), torch.empty(keys.shape)
            keys, values = rooms[keys.shape]
        head_dim = keys.shape[-1]
        by_head = keys.view(-1, head_dim).t(), values.view(-1, head_dim)
        found.append(LayerCache(keys.numpy(), values.numpy(), stored, by_head))
    return tuple(found)


def blocks_read(batch: ForwardBatch, cache: KVCache) -> NDArray[np.int64]:
    """Return the blocks of live rows, each once; none if the cache is float32, which attention reads in place."""
    if not cache.keys or cache.keys[0].dtype != _FP8:
        return np.zeros(0, np.int64)
    tables: NDArray[np.int32] = batch.block_tables.numpy()
    begins = np.arange(tables.shape[1]) * cache.block_size
    return np.unique(tables[begins < batch.seq_lens.numpy()[:, None]]).astype(np.int64)


def _by_slot(blocks: NDArray[np.generic]) -> NDArray[np.generic]:
    """View blocks as [KV slots, kv_heads, head_dim]."""
    return blocks.reshape(-1, *blocks.shape[2:])


def _quantized(numbers: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantize to FP8 bits of the same shape."""
    bounded = np.clip(numbers / scale, -_LARGEST, _LARGEST)
    bounded[~np.isfinite(numbers)] = np.nan
    bits: NDArray[np.uint8] = torch.from_numpy(bounded).to(_FP8).view(torch.uint8).numpy()
    return bits


@dataclass(frozen=True, slots=True)
class _Segment:
    """Tokens of similar lengths, computed together. R = tokens * heads rows of pairs, P = R * width.

    A forward sets `keys` and `mask`; the rest depends only on `tokens` and the width.
    """

    tokens: NDArray[np.int64]  # their indexes in the forward
    offset: NDArray[np.int64]  # [width] 0, 1, ...
    kv_head: NDArray[np.int64]  # [heads, 1] that a query head reads
    pairs: torch.Tensor  # sparse CSR [T * q_stride, slots * kv_heads] of existing pairs; its values are `scores`
    scores: torch.Tensor  # float32 [R, width]
    weights: torch.Tensor  # float32 [R, width]
    flat_weights: torch.Tensor  # float32 [P], the same memory
    flat_keys: torch.Tensor  # int [P] slot * kv_heads + KV head
    offsets: torch.Tensor  # int [T * heads + 1] the first pair of each query head; tokens of other segments have none
    keys: NDArray[np.int32] | NDArray[np.int64]  # [tokens, heads, width], the memory of `flat_keys`
    starts: NDArray[np.float32]  # [tokens, heads, width], the memory of `scores`
    mask: NDArray[np.float32]  # [tokens, 1, width] 0, or -inf for padding keys; what scores start from


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The pairs of a forward for one window, made once and used by every layer with that window."""

    tokens: int  # T, padding included
    shape: AttentionShape
    segments: tuple[_Segment, ...]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Query tokens that attend to something, ascending by `number`, the index in the forward."""

    number: NDArray[np.int64]
    row: NDArray[np.int64]  # row of `block_tables`
    first: NDArray[np.int64]  # first visible position
    count: NDArray[np.int64]  # visible positions, at least 1; the token's own is the last

    def take(self, which: NDArray[np.int64]) -> _Tokens:
        return _Tokens(self.number[which], self.row[which], self.first[which], self.count[which])


def plan_attention(
    batch: ForwardBatch,
    tokens: int,
    q_stride: int,
    shape: AttentionShape,
    slots: int,
    block_size: int,
    window: int,
    previous: AttentionPlan | None = None,
    first: int = 0,
) -> AttentionPlan:
    """Plan the pairs of a forward.
    tokens: T, at least `batch.num_tokens`. q_stride: see `attend`. slots: of the cache. window, first: of the layer.

    previous: an unused plan with the same shape, q_stride and slots, whose buffers are reused.
    """
    tables: NDArray[np.int32] = batch.block_tables.numpy()
    old = previous.segments if previous is not None and previous.tokens == tokens else ()
    segments: list[_Segment] = []
    for i, group in enumerate(_group_by_length(_live_tokens(batch, window, first), shape.heads)):
        width = _width(int(group.count.max()))
        segment = old[i] if i < len(old) and _fits_in(group, width, old[i]) else None
        if segment is None:
            segment = _make_segment(group.number, width, tokens, q_stride, shape, slots)
        _fill(segment, group, tables, block_size, shape)
        segments.append(segment)
    return AttentionPlan(tokens, shape, tuple(segments))


class KeptPlans:
    """The plans of a model's forwards, one for each window, over a cache of one size.

    A plan reuses the buffers of an earlier forward with as many tokens, if they fit. With drafts the number of tokens
    varies, so plans of several numbers are kept while all are small together.
    """

    def __init__(self) -> None:
        self._plans: dict[int, tuple[AttentionPlan, ...]] = {}  # by number of tokens, the latest last

    def make(
        self,
        batch: ForwardBatch,
        tokens: int,
        windows: Sequence[tuple[AttentionShape, int, int]],
        slots: int,
        block_size: int,
    ) -> tuple[AttentionPlan, ...]:
        """Make the plans of a forward, which invalidates earlier ones. windows: shape, window and `first` of each, the
        same in every call. tokens, slots: see `plan_attention`.
        """
        before = self._plans.pop(batch.num_tokens, (None,) * len(windows))
        plans = []
        for (shape, window, first), old in zip(windows, before, strict=True):
            q_stride = shape.heads + 2 * shape.kv_heads
            plans.append(plan_attention(batch, tokens, q_stride, shape, slots, block_size, window, old, first))
        self._plans[batch.num_tokens] = tuple(plans)
        while len(self._plans) > 1 and self.pairs > _MAX_KEPT_PAIRS:
            del self._plans[next(iter(self._plans))]
        return self._plans[batch.num_tokens]

    @property
    def pairs(self) -> int:
        """The number of pairs with allocated memory, padding included: 12 bytes each."""
        return sum(part.keys.size for plans in self._plans.values() for plan in plans for part in plan.segments)


def attend(
    plan: AttentionPlan, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cap: float = 0.0
) -> torch.Tensor:
    """Compute attention.
    q: float32 [T * q_stride, head_dim]; the first `heads` of a token's q_stride rows are its queries.

    keys: float32 [head_dim, slots * kv_heads]. values: float32 [slots * kv_heads, head_dim].
    cap: see `Attention.score_cap`. Returns float32 [T, heads * head_dim], zero for tokens that see nothing.
    """
    out: torch.Tensor | None = None
    for part in plan.segments:
        np.copyto(part.starts, np.float32(0.0) if cap else part.mask)
        torch.sparse.sampled_addmm(part.pairs, q, keys, beta=1.0, alpha=plan.shape.scale, out=part.pairs)
        if cap:
            bound(part.starts, cap)
            np.add(part.starts, part.mask, out=part.starts)
        torch.softmax(part.scores, dim=-1, out=part.weights)
        sums = torch.embedding_bag(values, part.flat_keys, part.offsets, False, 0, False, part.flat_weights, True)[0]
        out = sums if out is None else out.add_(sums)
    if out is None:
        return q.new_zeros((plan.tokens, plan.shape.q_size))
    return out.view(plan.tokens, -1)


def silence_sparse_warning() -> None:
    """Silence torch's warning that CSR tensors are in beta; the self-test checks them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 1), check_invariants=False)


def _live_tokens(batch: ForwardBatch, window: int, first: int) -> _Tokens:
    seq_lens = batch.seq_lens.numpy().astype(np.int64)
    if batch.is_decode and batch.decode_queries == 1:
        number = row = np.flatnonzero(seq_lens)
        end = seq_lens[row]
    else:
        starts = batch.query_start_loc.numpy().astype(np.int64)
        row = np.repeat(np.arange(batch.num_rows), np.diff(starts))
        # A row's last query token sees all of it, the previous one a position less, and so on.
        end = (seq_lens - starts[1:])[row] + np.arange(1, len(row) + 1)
        number = np.flatnonzero(seq_lens[row])
        row, end = row[number], end[number]
    if first:
        attends = end > first
        number, row, end = number[attends], row[attends], end[attends]
    begin = np.maximum(end - window, first) if window else np.full_like(end, first)
    return _Tokens(number, row, begin, end - begin)


def _group_by_length(live: _Tokens, heads: int) -> list[_Tokens]:
    """Group tokens by length so that padding costs less than further groups would."""
    if len(live.count) == 0:
        return []
    if _fits(int(live.count.min()), int(live.count.max()), len(live.count), heads):
        return [live]
    order = np.argsort(live.count, kind="stable")
    ordered = live.count[order].tolist()
    groups: list[_Tokens] = []
    begin = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or not _fits(ordered[begin], ordered[end], end + 1 - begin, heads):
            groups.append(live.take(np.sort(order[begin:end])))
            begin = end
    return groups


def _fits(shortest: int, longest: int, tokens: int, heads: int) -> bool:
    return longest <= 2 * shortest + 64 and tokens * heads * _width(longest) <= _MAX_PAIRS


def _width(count: int) -> int:
    return ceil_div(count, _LANES) * _LANES


def _fits_in(group: _Tokens, width: int, segment: _Segment) -> bool:
    return segment.offset.size == width and np.array_equal(segment.tokens, group.number)


def _make_segment(
    number: NDArray[np.int64], width: int, tokens: int, q_stride: int, shape: AttentionShape, slots: int
) -> _Segment:
    heads, columns = shape.heads, slots * shape.kv_heads
    rows = len(number) * heads
    fits_int32 = max(columns, rows * width, tokens * q_stride) < 1 << 31
    keys = np.empty((len(number), heads, width), np.int32 if fits_int32 else np.int64)
    flat_keys = torch.from_numpy(keys).view(-1)
    scores, weights = torch.empty((2, rows, width)).unbind()
    pairs = torch.sparse_csr_tensor(
        _offsets(number, tokens, q_stride, heads, width, flat_keys.dtype),
        flat_keys,
        scores.view(-1),
        (tokens * q_stride, columns),
        check_invariants=False,
    )
    return _Segment(
        number,
        np.arange(width),
        np.arange(heads)[:, None] // (heads // shape.kv_heads),
        pairs,
        scores,
        weights,
        weights.view(-1),
        flat_keys,
        _offsets(number, tokens, heads, heads, width, flat_keys.dtype),
        keys,
        scores.numpy().reshape(keys.shape),
        np.empty((len(number), 1, width), np.float32),
    )


def _fill(segment: _Segment, group: _Tokens, tables: NDArray[np.int32], block_size: int, shape: AttentionShape) -> None:
    """Set the keys of every token of `group`, and mask those beyond its own."""
    last = group.count[:, None] - 1
    block, offset = np.divmod(np.minimum(segment.offset, last) + group.first[:, None], block_size)
    slot = np.multiply(tables[group.row[:, None], block], block_size, dtype=np.int64) + offset  # [tokens, width]
    np.add((slot * shape.kv_heads)[:, None, :], segment.kv_head, out=segment.keys, casting="same_kind")
    segment.mask[:, 0] = np.where(segment.offset <= last, np.float32(0.0), np.float32(-np.inf))


def _offsets(
    number: NDArray[np.int64], tokens: int, stride: int, heads: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return each row's first pair, [tokens * stride + 1], if the first `heads` rows of the numbered tokens have
    `width` pairs.
    """
    pairs = np.zeros((tokens, stride), dtype=np.int64)
    pairs[number, :heads] = width
    begins = np.zeros(tokens * stride + 1, dtype=np.int64)
    np.cumsum(pairs, out=begins[1:])
    return torch.from_numpy(begins).to(dtype)
