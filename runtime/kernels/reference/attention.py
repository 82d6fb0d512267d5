"""Causal attention over a paged KV cache, one query head of one token at a time as far as arithmetic goes.

Scores are a product sampled at the (query head, key) pairs that exist: one dot product a pair, read from the cache
where it lies. The weighted sum of values is an embedding bag: one running sum a query head, in the order of positions.
Neither gathers the cache, and neither knows of other rows, so chunks, neighbours, padding and threads change no bit.
The softmax between them runs over rows padded to a common width with keys of weight zero, which adds exact zeros.

A padding key names the token's own newest key, never a slot beyond the row: what lies there may be NaN.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.forward_batch import ForwardBatch
from runtime.kernels.kernel_set import AttentionShape

# The softmax sums in vector lanes, key j in lane j modulo the vector's width: rows end at a multiple of the widest.
_LANES = 16
# Pairs a segment may have: bounds the memory that attention takes beside the cache.
_MAX_PAIRS = 1 << 21


@dataclass(frozen=True, slots=True)
class _Segment:
    """Tokens of similar lengths, attended in one go. R = tokens * heads rows of pairs, P = R * width."""

    pairs: torch.Tensor  # sparse CSR [T * q_stride, slots * kv_heads], which pairs exist; its values are `scores`
    scores: torch.Tensor  # float32 [R, width]
    mask: torch.Tensor  # float32 [R, width] 0, or -inf for padding keys
    weights: torch.Tensor  # float32 [R, width]
    flat_weights: torch.Tensor  # float32 [P], the same memory
    keys: torch.Tensor  # int [P] slot * kv_heads + KV head
    offsets: torch.Tensor  # int [T * heads + 1] where a query head's pairs begin; none for tokens of other segments


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which pairs attend in a forward, for one window. Made once, used by every layer with that window."""

    tokens: int  # T, padding included
    shape: AttentionShape
    segments: tuple[_Segment, ...]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Query tokens that attend to something: `number` is a token's place in the forward, in ascending order."""

    number: NDArray[np.int64]
    row: NDArray[np.int64]  # its row of `block_tables`
    first: NDArray[np.int64]  # the first position it attends to
    count: NDArray[np.int64]  # how many positions, its own the last; at least 1

    def take(self, which: NDArray[np.int64]) -> _Tokens:
        return _Tokens(self.number[which], self.row[which], self.first[which], self.count[which])


def plan_attention(
    batch: ForwardBatch, tokens: int, q_stride: int, shape: AttentionShape, slots: int, block_size: int, window: int
) -> AttentionPlan:
    """tokens: T, at least `batch.num_tokens`. q_stride: as in `attend`. slots: of the cache. window: of the layer."""
    live = _live_tokens(batch, window)
    tables = batch.block_tables.numpy()
    segments = tuple(
        _segment(group, tables, tokens, q_stride, shape, slots, block_size)
        for group in _group_by_length(live, shape.heads)
    )
    return AttentionPlan(tokens, shape, segments)


def attend(plan: AttentionPlan, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """q: float32 [T * q_stride, head_dim]; of a token's q_stride rows the first `heads` are its queries.

    keys: float32 [head_dim, slots * kv_heads]. values: float32 [slots * kv_heads, head_dim].
    Returns float32 [T, heads * head_dim], zero for tokens that attend to nothing.
    """
    out: torch.Tensor | None = None
    for part in plan.segments:
        part.scores.copy_(part.mask)
        torch.sparse.sampled_addmm(part.pairs, q, keys, beta=1.0, alpha=plan.shape.scale, out=part.pairs)
        torch.softmax(part.scores, dim=-1, out=part.weights)
        sums = torch.embedding_bag(values, part.keys, part.offsets, False, 0, False, part.flat_weights, True)[0]
        out = sums if out is None else out.add_(sums)
    if out is None:
        return q.new_zeros((plan.tokens, plan.shape.q_size))
    return out.view(plan.tokens, plan.shape.q_size)


def silence_sparse_warning() -> None:
    """torch says once a process that CSR tensors are in beta. The self-test is what we rely on instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 1), check_invariants=False)


def _live_tokens(batch: ForwardBatch, window: int) -> _Tokens:
    seq_lens = batch.seq_lens.numpy().astype(np.int64)
    if batch.is_decode:
        number = row = np.flatnonzero(seq_lens)
        end = seq_lens[row]
    else:
        starts = batch.query_start_loc.numpy().astype(np.int64)
        row = np.repeat(np.arange(batch.num_rows), np.diff(starts))
        # A row's last query token attends to all of it, the one before to one less, and so on.
        end = (seq_lens - starts[1:])[row] + np.arange(1, len(row) + 1)
        number = np.flatnonzero(seq_lens[row])
        row, end = row[number], end[number]
    count = np.minimum(end, window) if window else end
    return _Tokens(number, row, end - count, count)


def _group_by_length(live: _Tokens, heads: int) -> list[_Tokens]:
    """Cut the tokens in groups whose padding costs less than another group would."""
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
    return -(-count // _LANES) * _LANES


def _segment(
    group: _Tokens,
    tables: NDArray[np.int32],
    tokens: int,
    q_stride: int,
    shape: AttentionShape,
    slots: int,
    block_size: int,
) -> _Segment:
    heads, kv_heads = shape.heads, shape.kv_heads
    width = _width(int(group.count.max()))
    rows = len(group.number) * heads
    fits_int32 = max(slots * kv_heads, rows * width, tokens * q_stride) < 1 << 31
    place = np.arange(width)
    last = group.count[:, None] - 1
    block, offset = np.divmod(group.first[:, None] + np.minimum(place, last), block_size)
    slot = tables[group.row[:, None], block].astype(np.int64) * block_size + offset  # [tokens, width]
    head = np.arange(heads) // (heads // kv_heads)
    keys = (slot * kv_heads)[:, None, :] + head[:, None]  # [tokens, heads, width]
    keys_flat = torch.from_numpy(keys.astype(np.int32 if fits_int32 else np.int64)).view(-1)
    mask = np.empty((len(group.number), heads, width), dtype=np.float32)
    mask[:] = np.where(place <= last, np.float32(0.0), np.float32(-np.inf))[:, None, :]
    scores, weights = torch.empty((2, rows, width)).unbind()
    pairs = torch.sparse_csr_tensor(
        _offsets(group.number, tokens, q_stride, heads, width, keys_flat.dtype),
        keys_flat,
        scores.view(-1),
        (tokens * q_stride, slots * kv_heads),
        check_invariants=False,
    )
    return _Segment(
        pairs,
        scores,
        torch.from_numpy(mask).view(rows, width),
        weights,
        weights.view(-1),
        keys_flat,
        _offsets(group.number, tokens, heads, heads, width, keys_flat.dtype),
    )


def _offsets(
    number: NDArray[np.int64], tokens: int, stride: int, heads: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """[tokens * stride + 1] where rows begin, if the first `heads` rows of the numbered tokens have `width` pairs."""
    pairs = np.zeros((tokens, stride), dtype=np.int64)
    pairs[number, :heads] = width
    begins = np.zeros(tokens * stride + 1, dtype=np.int64)
    np.cumsum(pairs, out=begins[1:])
    return torch.from_numpy(begins).to(dtype)
