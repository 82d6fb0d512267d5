"""Attention of decode launches whose rows have one to eight query tokens, against the reference's attention.

Free blocks, tails, the cells of the query tokens, what earlier launches have left in the buffers, and the result before
the kernel runs are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.forward_batch import ForwardBatch  # noqa: E402
from runahead.runtime.kernels.reference.attention import attend as attend_by_reference  # noqa: E402
from runahead.runtime.kernels.reference.attention import plan_attention, silence_sparse_warning  # noqa: E402
from runahead.runtime.kernels.triton.attention.decode import decode_attention  # noqa: E402
from runahead.runtime.kernels.triton.attention.query_tokens import MAX_QUERIES, share_of  # noqa: E402
from runahead.runtime.kernels.triton.attention.schedule import AttentionPlan, begin_decode  # noqa: E402
from runahead.runtime.kernels.triton.attention.split_kv import make_part_buffers  # noqa: E402
from runahead.runtime.kernels.triton.gpu.pdl import dependent_launch_works  # noqa: E402
from tests.runtime.kernels.test_triton_decode_attention import (  # noqa: E402
    CONTEXT,
    ERROR,
    PLANS,
    Rows,
    make_rows,
    rotated,
)

silence_sparse_warning()
NAN = float("nan")
Shape = tuple[int, int, int, int]  # heads, KV heads, head_dim, block size
SMALL: Shape = (4, 2, 16, 8)
# Every number of query tokens; around the borders of blocks and tiles; one row new as a whole, one masked.
MIXED = [(1, 1), (300, 8), (0, 3), (128, 5), (33, 2), (257, 7), (16, 4), (19, 6), (8, 8), (40, 1), (161, 3)]
PADDING = 3  # tokens of no row, behind those of the last


@dataclass
class Batch:
    """Rows of query tokens. `rows.qkv` has a line for each of them, and for the padding."""

    rows: Rows
    counts: list[int]

    @property
    def starts(self) -> list[int]:
        return [0, *torch.tensor(self.counts).cumsum(0).tolist()]

    def tokens(self, row: int) -> slice:
        return slice(self.starts[row], self.starts[row + 1])

    def only(self, chosen: list[int]) -> Batch:
        """These rows, and a cache of their own."""
        lines = torch.cat([torch.arange(self.starts[row], self.starts[row + 1]) for row in chosen])
        rows = self.rows.only(chosen)
        rows.qkv = torch.cat([self.rows.qkv[lines.to(DEVICE)], self.rows.qkv[:PADDING]])
        return Batch(rows, [self.counts[row] for row in chosen])


def make_batch(
    wanted: list[tuple[int, int]], shape: Shape, dtype: torch.dtype, *, window: int = 0, normed: bool = False
) -> Batch:
    """wanted: each row's tokens, and how many of them are query tokens."""
    rows = make_rows([length for length, _ in wanted], shape, dtype, window=window, normed=normed)
    heads, kv_heads, dim, block_size = shape
    counts = [count for _, count in wanted]
    rows.qkv = torch.randn(sum(counts) + PADDING, (heads + 2 * kv_heads) * dim).to(DEVICE, dtype)
    for row, (length, count) in enumerate(wanted):
        for position in range(max(length - count, 0), length):
            home = rows.tables[row, position // block_size], position % block_size
            rows.keys[home] = rows.values[home] = NAN
    return Batch(rows, counts)


def attend(batch: Batch, plan: AttentionPlan, queries: int = MAX_QUERIES, *, dependent: bool = False) -> torch.Tensor:
    """[tokens, heads * dim]. Work is cut for two windows, of which the second is the rows' own."""
    rows, shape = batch.rows, batch.rows.weights.shape
    starts = torch.tensor(batch.starts, dtype=torch.int32, device=DEVICE)
    tokens, count = rows.qkv.shape[0], rows.seq_lens.shape[0]
    table, token_ids = torch.randn(9, 48, device=DEVICE), torch.randint(0, 9, (tokens,), device=DEVICE)
    residual = torch.full((tokens, 48), NAN, device=DEVICE)
    windows = torch.tensor([7, rows.weights.window], dtype=torch.int32, device=DEVICE)
    work = begin_decode(
        token_ids, table, residual, rows.seq_lens, windows, plan, queries=queries, query_start_loc=starts
    )
    assert torch.equal(residual, table[token_ids])
    buffers = make_part_buffers(count, shape, plan, CONTEXT, DEVICE, queries)
    for buffer in (buffers.partial, buffers.top, buffers.total):
        buffer.fill_(NAN)
    out = torch.full((tokens, shape.q_size), NAN, dtype=rows.qkv.dtype, device=DEVICE)
    decode_attention(
        rows.qkv, out, rows.keys, rows.values, rows.tables, rows.seq_lens, work.items[1], work.total[1], rows.rope,
        rows.weights, plan, buffers, dependent=dependent, queries=queries, query_start_loc=starts,
    )  # fmt: skip
    assert not buffers.arrived.any(), "the counters of parts are as they were"
    assert bool(out[batch.starts[-1] :].isnan().all()), "tokens of no row get nothing"
    return out[: batch.starts[-1]]


def expected_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By the reference: float32 [tokens, heads * dim], and the cache as it must be afterwards."""
    rows, shape, window = batch.rows, batch.rows.weights.shape, batch.rows.weights.window
    keys, values = rows.keys.float().cpu().clone(), rows.values.float().cpu().clone()
    block_size, tokens = keys.shape[1], batch.starts[-1]
    q = torch.zeros(tokens, shape.heads, shape.head_dim)
    for row, count in enumerate(batch.counts):
        length = int(rows.seq_lens[row])
        for j, token in enumerate(range(*batch.tokens(row).indices(tokens)) if length else ()):
            position = length - count + j
            heads = rows.qkv[token].view(-1, shape.head_dim).split([shape.heads, shape.kv_heads, shape.kv_heads])
            q[token] = rotated(heads[0], rows.weights.q_norm, rows.rope, position).float()
            home = int(rows.tables[row, position // block_size]), position % block_size
            keys[home] = rotated(heads[1], rows.weights.k_norm, rows.rope, position).float()
            values[home] = heads[2].float()
    unread, lengths = torch.zeros(tokens, dtype=torch.int64), rows.seq_lens.cpu()
    forward = ForwardBatch(
        unread, unread, unread, torch.tensor(batch.starts, dtype=torch.int32), lengths, rows.tables.cpu(), tokens,
        len(batch.counts), int(lengths.max()), is_decode=True, decode_queries=max(batch.counts),
    )  # fmt: skip
    slots = keys.shape[0] * block_size
    plan = plan_attention(forward, tokens, shape.heads, shape, slots, block_size, window)
    out = attend_by_reference(
        plan, q.view(-1, shape.head_dim), keys.view(-1, shape.head_dim).t(), values.view(-1, shape.head_dim),
        rows.weights.score_cap,
    )  # fmt: skip
    return out, keys, values


def check(batch: Batch, plan: AttentionPlan, queries: int = MAX_QUERIES) -> None:
    """Against the reference: the result, and the cache, of which nothing but the query tokens' cells has changed."""
    expected, keys, values = expected_of(batch)
    before, error = batch.rows.keys.clone(), ERROR[batch.rows.qkv.dtype]
    out = attend(batch, plan, queries)
    for row, count in enumerate(batch.counts):
        if int(batch.rows.seq_lens[row]) == 0:
            assert not out[batch.tokens(row)].any(), "a masked row gets zeros"
            continue
        for j in range(count):
            token = batch.starts[row] + j
            assert relative_error(out[token], expected[token]) < error, f"query token {j} of row {row}"
    written = before.isnan().cpu() & ~keys.isnan()
    assert relative_error(batch.rows.keys.cpu()[written], keys[written]) < error
    assert torch.equal(batch.rows.values.float().cpu().nan_to_num(7.0), values.nan_to_num(7.0))
    kept = batch.rows.keys.float().cpu()[~written], before.float().cpu()[~written]
    assert torch.equal(kept[0].nan_to_num(7.0), kept[1].nan_to_num(7.0)), "nothing else is written"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("shape", "window", "normed", "dtype"),
    [
        (SMALL, 0, False, torch.float32),
        (SMALL, 50, True, torch.bfloat16),
        (SMALL, 3, False, torch.float32),  # which hides a row's first query tokens from its last
        ((6, 1, 24, 16), 0, True, torch.float32),
        ((12, 1, 96, 16), 20, True, torch.float32),  # more lines than a program takes
    ],
)
def test_rows_of_one_to_eight_query_tokens_in_one_batch(
    plan: AttentionPlan, shape: Shape, window: int, normed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    check(make_batch(MIXED, shape, dtype, window=window, normed=normed), plan)


@pytest.mark.parametrize(("queries", "share"), [(2, 0), (3, 2), (4, 1)])
def test_a_kernel_for_fewer_query_tokens(queries: int, share: int) -> None:
    """share: all of them in one program, or a few."""
    torch.manual_seed(2)
    rows = [(length, min(count, queries)) for length, count in MIXED]
    check(make_batch(rows, SMALL, torch.float32, window=40), replace(PLANS[1], share=share), queries)


def test_many_query_heads_of_a_kv_head_are_shared_out_over_programs() -> None:
    assert share_of(8, group=12, head_dim=96) == 4
    assert share_of(8, group=4, head_dim=128) == 8
    assert share_of(8, group=4, head_dim=256) == 8
    assert share_of(8, group=71, head_dim=128) == 1
    assert share_of(1, group=300, head_dim=256) == 1
    assert (share_of(8, group=4, head_dim=128, most=2), share_of(2, group=4, head_dim=128, most=4)) == (2, 2)


@pytest.mark.parametrize("plan", PLANS)
def test_query_tokens_before_the_first_position_get_zeros_and_write_nothing(plan: AttentionPlan) -> None:
    torch.manual_seed(3)
    whole = make_batch([(40, 2), (3, 3), (90, 8)], SMALL, torch.float32)
    longer = whole.only([0, 1, 2])
    first = whole.starts[1]
    longer.rows.qkv = torch.cat([longer.rows.qkv[:first], longer.rows.qkv[-2:], longer.rows.qkv[first:]])
    longer.counts[1] += 2
    expected, found = attend(whole, plan), attend(longer, plan)
    assert not found[first : first + 2].any()
    rest = torch.cat([found[:first], found[first + 2 :]])
    # A host's product of matrices may add up a row in another order where it lies elsewhere in its tile.
    assert relative_error(rest, expected) < 1e-6 if DEVICE.type == "cpu" else torch.equal(rest, expected)
    for mine, wanted in ((longer.rows.keys, whole.rows.keys), (longer.rows.values, whole.rows.values)):
        assert torch.equal(mine.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("plan", PLANS)
def test_a_row_has_the_same_bits_whatever_its_neighbours(plan: AttentionPlan) -> None:
    torch.manual_seed(4)
    batch = make_batch([(70, 8), (37, 3), (100, 1), (0, 2), (129, 5)], SMALL, torch.float32)
    alone = {row: attend(batch.only([row, 3, 3, 3, 3]), plan)[: batch.counts[row]] for row in range(5)}
    for others in ([0, 1, 2, 3, 4], [4, 0, 2, 1, 3]):
        chosen = batch.only(others)
        found = attend(chosen, plan)
        for place, row in enumerate(others):
            assert torch.equal(found[chosen.tokens(place)], alone[row])


@pytest.mark.parametrize(("part", "bad"), [("key", NAN), ("value", NAN), ("value", float("inf"))])
@pytest.mark.parametrize("plan", PLANS)
def test_a_draft_that_is_not_finite_spoils_those_behind_it_and_nothing_before(
    plan: AttentionPlan, part: str, bad: float
) -> None:
    torch.manual_seed(5)
    rows = [(40, 3), (100, 6), (90, 2)]
    good = make_batch(rows, SMALL, torch.float32)
    spoilt = good.only([0, 1, 2])
    heads, kv_heads, dim, _ = SMALL
    spoilt.rows.qkv[3 + 4, (heads + (kv_heads if part == "value" else 0)) * dim] = bad  # of the first KV head
    group = heads // kv_heads
    expected, found = (attend(batch, plan).view(-1, heads, dim) for batch in (good, spoilt))
    assert not bool(found[3 + 4 : 3 + 6, :group].isfinite().all(-1).any())
    assert torch.equal(found[3 + 4 : 3 + 6, group:], expected[3 + 4 : 3 + 6, group:])
    for clean in (slice(0, 3 + 4), slice(3 + 6, None)):
        assert torch.equal(found[clean], expected[clean])


GPU_PLANS = [
    AttentionPlan(tile=32, chunk=1, programs=264, warps=2, stages=1, early=True),
    AttentionPlan(tile=32, chunk=6, programs=132, warps=1, stages=5, early=False),
]
GPU_SHAPES: list[Shape] = [(16, 2, 64, 16), (8, 1, 96, 16), (16, 8, 128, 16), (32, 4, 128, 16), (8, 4, 256, 16)]


@pytest.mark.gpu
@pytest.mark.parametrize("plan", GPU_PLANS)
@pytest.mark.parametrize("shape", GPU_SHAPES)
@pytest.mark.parametrize(("queries", "dtype"), [(2, torch.bfloat16), (4, torch.float16), (8, torch.bfloat16)])
def test_compiled_for_every_head_size(shape: Shape, plan: AttentionPlan, queries: int, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    rows = [(length, min(count, queries)) for length, count in MIXED]
    check(make_batch(rows, shape, dtype, window=100, normed=True), plan, queries)


@pytest.mark.gpu
@pytest.mark.skipif(not dependent_launch_works(), reason="this GPU knows no programmatic dependent launch")
@pytest.mark.parametrize("plan", GPU_PLANS)
def test_launched_dependently_the_bits_are_the_same(plan: AttentionPlan) -> None:
    torch.manual_seed(7)
    batch = make_batch(MIXED, GPU_SHAPES[0], torch.bfloat16, normed=True)
    everybody = list(range(len(MIXED)))
    expected = attend(batch.only(everybody), plan)
    for _ in range(5):
        assert torch.equal(attend(batch.only(everybody), plan, dependent=True), expected)
