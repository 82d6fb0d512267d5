"""The reference's paged attention against a plain softmax in float64, with everything out of bounds poisoned."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import AttentionShape
from runahead.runtime.kernels.reference.attention import (
    AttentionPlan,
    KeptPlans,
    attend,
    plan_attention,
    silence_sparse_warning,
)

SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=24, scale=0.3)
BLOCK_SIZE = 8
NAN = float("nan")

silence_sparse_warning()


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a batch: how many tokens it attends to, and how many of them are its query tokens."""

    seq_len: int
    queries: int = 1


@dataclass(frozen=True, slots=True)
class World:
    """A poisoned cache that holds the keys and values of rows in scattered blocks."""

    rows: tuple[Row, ...]
    q: tuple[torch.Tensor, ...]  # by row [queries, heads, head_dim]
    k: tuple[torch.Tensor, ...]  # by row [seq_len, kv_heads, head_dim]
    v: tuple[torch.Tensor, ...]
    tables: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def slots(self) -> int:
        return self.keys.shape[0] * BLOCK_SIZE

    def batch(self, chosen: list[int], padding_tokens: int = 0) -> ForwardBatch:
        queries = [self.rows[i].queries for i in chosen]
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
        owned = sum(queries)
        nothing = torch.zeros(owned + padding_tokens, dtype=torch.int64)
        lens = torch.tensor([self.rows[i].seq_len for i in chosen], dtype=torch.int32)
        tables = self.tables[torch.tensor(chosen)]
        return ForwardBatch(
            nothing, nothing, nothing, starts, lens, tables, owned, len(chosen), int(lens.max()), max(queries) == 1
        )

    def plan(
        self, chosen: list[int], padding_tokens: int = 0, window: int = 0, previous: AttentionPlan | None = None
    ) -> AttentionPlan:
        batch = self.batch(chosen, padding_tokens)
        tokens = batch.num_tokens + padding_tokens
        return plan_attention(batch, tokens, SHAPE.heads, SHAPE, self.slots, BLOCK_SIZE, window, previous)

    def attend(
        self, chosen: list[int], padding_tokens: int = 0, window: int = 0, plan: AttentionPlan | None = None
    ) -> list[torch.Tensor]:
        """Outputs by chosen row, and last those of the padding tokens."""
        q = torch.cat([*(self.q[i] for i in chosen), torch.full((padding_tokens, *self.q[0].shape[1:]), NAN)])
        plan = self.plan(chosen, padding_tokens, window) if plan is None else plan
        keys, values = self.keys.view(-1, SHAPE.head_dim).t(), self.values.view(-1, SHAPE.head_dim)
        out = attend(plan, q.view(-1, SHAPE.head_dim), keys, values)
        return list(out.split([*(self.rows[i].queries for i in chosen), padding_tokens]))

    def expected(self, row: int, window: int = 0) -> torch.Tensor:
        """float64 [queries, heads * head_dim]."""
        seq_len, queries = self.rows[row].seq_len, self.rows[row].queries
        group = SHAPE.heads // SHAPE.kv_heads
        k = self.k[row].double().repeat_interleave(group, dim=1)
        v = self.v[row].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", self.q[row].double(), k) * SHAPE.scale
        behind = (torch.arange(seq_len - queries, seq_len)[:, None] - torch.arange(seq_len)[None, :]).int()
        hidden = (behind < 0) | (behind >= window if window else torch.zeros_like(behind, dtype=torch.bool))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(queries, -1)


def make_world(*rows: Row) -> World:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    width = max(-(-row.seq_len // BLOCK_SIZE) for row in rows) + 1
    num_blocks = len(rows) * width + 2
    order = (torch.randperm(num_blocks - 2, generator=generator) + 1).view(len(rows), width)
    keys = torch.full((num_blocks, BLOCK_SIZE, SHAPE.kv_heads, SHAPE.head_dim), NAN)
    values = keys.clone()
    k = tuple(draw(row.seq_len, SHAPE.kv_heads, SHAPE.head_dim) for row in rows)
    v = tuple(draw(row.seq_len, SHAPE.kv_heads, SHAPE.head_dim) for row in rows)
    for number, row in enumerate(rows):
        for position in range(row.seq_len):
            block = order[number, position // BLOCK_SIZE]
            keys[block, position % BLOCK_SIZE] = k[number][position]
            values[block, position % BLOCK_SIZE] = v[number][position]
    q = tuple(draw(row.queries, SHAPE.heads, SHAPE.head_dim) for row in rows)
    return World(rows, q, k, v, order.int(), keys, values)


@pytest.mark.parametrize("window", [0, 1, 5, 40])
def test_decode_rows_and_chunks_attend_to_what_is_before_them(window: int) -> None:
    world = make_world(Row(33), Row(1), Row(17, 17), Row(60, 9), Row(8), Row(41, 2))
    for row, out in enumerate(world.attend([0, 1, 2, 3, 4, 5], window=window)[:-1]):
        assert (out - world.expected(row, window)).abs().max().item() < 2e-6


def test_a_masked_row_and_padding_tokens_get_zeros_and_spoil_nothing() -> None:
    world = make_world(Row(20), Row(0), Row(30, 5), Row(0, 3))
    alone = world.attend([0])[0]
    among = world.attend([1, 0, 3, 2], padding_tokens=6)
    assert torch.equal(among[1], alone)
    for zeros in (among[0], among[2], among[4]):
        assert torch.equal(zeros, torch.zeros_like(zeros))


def test_a_batch_of_masked_rows_alone_is_zeros() -> None:
    world = make_world(Row(0), Row(0))
    assert all(torch.equal(out, torch.zeros_like(out)) for out in world.attend([0, 1], padding_tokens=6))


def test_a_row_of_nan_stays_alone_with_it() -> None:
    world = make_world(Row(20), Row(24), Row(28))
    before = world.attend([0, 1, 2])
    world.q[1][0, 2, 3] = NAN
    after = world.attend([0, 1, 2])
    assert after[1].isnan().any()
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[2], before[2])


def test_rows_of_very_different_lengths_are_cut_in_segments_and_keep_their_bits() -> None:
    world = make_world(Row(400), Row(3), Row(150, 90), Row(21), Row(390))
    assert len(world.plan([0, 1, 2, 3, 4]).segments) > 1
    assert len(world.plan([0, 4]).segments) == 1
    for row, out in enumerate(world.attend([0, 1, 2, 3, 4], padding_tokens=2)[:-1]):
        assert torch.equal(out, world.attend([row])[0])


@pytest.mark.parametrize("window", [0, 7])
def test_a_chunk_has_the_bits_of_its_tokens_one_by_one(window: int) -> None:
    world = make_world(Row(70, 70))
    whole = world.attend([0], window=window)[0]
    for length in (1, 2, 16, 17, 69, 70):
        one = World((Row(length),), (world.q[0][length - 1 : length],), (), (), world.tables, world.keys, world.values)
        assert torch.equal(one.attend([0], window=window)[0][0], whole[length - 1])


@pytest.mark.parametrize("queries", range(1, 9))
@pytest.mark.parametrize("window", [0, 7])
def test_rows_with_a_few_queries_each_have_the_bits_of_a_chunk_alone(queries: int, window: int) -> None:
    """As rows have that verify drafts: all have as many queries, behind contexts of different lengths."""
    world = make_world(Row(70, queries), Row(8, queries), Row(33, queries))
    together = world.attend([0, 1, 2], window=window)
    for row, found in enumerate(together[:-1]):
        assert torch.equal(found, world.attend([row], window=window)[0])
        assert torch.allclose(found.double(), world.expected(row, window), atol=1e-5)


def test_a_segment_never_holds_more_pairs_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(Row(60, 60))
    whole = world.attend([0])[0]
    monkeypatch.setattr("runahead.runtime.kernels.reference.attention._MAX_PAIRS", 4000)
    segments = world.plan([0]).segments
    assert len(segments) > 2
    assert all(segment.scores.numel() <= 4000 for segment in segments)
    assert torch.equal(world.attend([0])[0], whole)


@pytest.mark.parametrize("window", [0, 5])
def test_a_plan_made_from_the_one_before_has_its_buffers_and_its_own_numbers(window: int) -> None:
    """Rows of lengths that end in the same padded width take turns: other blocks, other masks, the same memory."""
    world = make_world(Row(20), Row(31), Row(17), Row(0), Row(29), Row(90))
    turns = ([0, 1], [1, 2], [2, 4], [0, 3], [4, 0], [5, 1], [2, 1])
    plan: AttentionPlan | None = None
    reused = 0
    for chosen in turns:
        before, plan = plan, world.plan(chosen, 2, window, plan)
        reused += before is not None and plan.segments[0].scores is before.segments[0].scores
        fresh = world.attend(chosen, 2, window)
        again = world.attend(chosen, 2, window, plan)
        assert all(torch.equal(one, other) for one, other in zip(again, fresh, strict=True))
    assert reused >= 2


def test_forwards_of_other_lengths_between_two_cost_a_plan_no_buffer_as_long_as_all_are_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_world(Row(20), Row(31, 3), Row(17, 2), Row(90, 5))
    kept = KeptPlans()

    def made(row: int) -> AttentionPlan:
        (plan,) = kept.make(world.batch([row]), world.rows[row].queries, [(SHAPE, 0, 0)], world.slots, BLOCK_SIZE)
        return plan

    first = {row: made(row).segments[0].scores for row in (0, 1, 2, 3)}
    assert all(made(row).segments[0].scores is scores for row, scores in first.items())
    monkeypatch.setattr("runahead.runtime.kernels.reference.attention._MAX_KEPT_PAIRS", 1000)
    made(0)
    assert kept.pairs <= 1000, "the oldest ones go"
    longest = made(3)
    assert kept.pairs == sum(segment.keys.size for segment in longest.segments) > 1000, "the newest is always kept"
