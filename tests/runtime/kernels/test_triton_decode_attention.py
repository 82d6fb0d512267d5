"""The attention kernel of decode launches against a loop over rows in float64.

Free blocks, tails, what earlier launches have left in the buffers, and the result before the kernel runs are NaN; what
memory holds where there is no item is the largest number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.runtime.kernels.triton_device import TOLERANCE, relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import Attention, AttentionShape, Linear, Norm, RopeTable  # noqa: E402
from runahead.runtime.kernels.triton.attention import decode  # noqa: E402
from runahead.runtime.kernels.triton.attention.decode import decode_attention  # noqa: E402
from runahead.runtime.kernels.triton.attention.schedule import MAX_PARTS, RECORD, AttentionPlan, begin_decode  # noqa: E402
from runahead.runtime.kernels.triton.attention.split_kv import make_part_buffers  # noqa: E402
from runahead.runtime.kernels.triton.gpu.pdl import dependent_launch_works  # noqa: E402
from tests.runtime.kernels.predecessor import check  # noqa: E402
from tests.runtime.kernels.test_triton_attention import bounded  # noqa: E402

EPS = 1e-5
CONTEXT = 640
NOTHING = torch.iinfo(torch.int32).max
DTYPES = (torch.float32, torch.bfloat16)
# The interpreter cuts bits off where a GPU rounds to bfloat16.
ERROR = TOLERANCE if DEVICE.type == "cuda" else {**TOLERANCE, torch.bfloat16: 1.6e-2}
SHAPES = [(4, 2, 16, 8), (6, 1, 24, 16), (4, 4, 64, 16), (8, 1, 96, 16)]  # heads, KV heads, head_dim, block size
PLANS = [  # one item a row, as many as there are tiles, and between; fewer programs than items, and more
    AttentionPlan(tile=16, group=64, programs=3, warps=1, stages=3, early=False),
    AttentionPlan(tile=16, group=4, programs=150, warps=1, stages=1, early=True, room=500),
    AttentionPlan(tile=32, group=3, programs=60, warps=2, stages=3, early=True),
    AttentionPlan(tile=16, group=6, programs=7, warps=1, stages=3, early=False, room=25),
]
LENGTHS = [1, 300, 0, 128, 33, 257, 16, 17]


@dataclass
class Rows:
    """Rows of random keys and values, each in blocks of its own in random order, and the newest token's projections."""

    qkv: torch.Tensor  # [rows, (heads + 2 * kv_heads) * dim]
    keys: torch.Tensor  # [num_blocks, block_size, kv_heads, dim]
    values: torch.Tensor
    tables: torch.Tensor  # int32 [rows, max_blocks]
    seq_lens: torch.Tensor  # int32 [rows]
    weights: Attention
    rope: RopeTable

    def only(self, rows: list[int]) -> Rows:
        return replace(
            self, qkv=self.qkv[rows], tables=self.tables[rows], seq_lens=self.seq_lens[rows], keys=self.keys.clone(),
            values=self.values.clone(),
        )  # fmt: skip


def make_rows(
    lengths: list[int], shape: tuple[int, int, int, int], dtype: torch.dtype, *, window: int = 0, normed: bool = False
) -> Rows:
    heads, kv_heads, dim, block_size = shape
    needed = [-(-length // block_size) for length in lengths]
    keys = torch.full((sum(needed) + 3, block_size, kv_heads, dim), float("nan"))
    values = keys.clone()
    order = (torch.randperm(sum(needed) + 2) + 1).tolist()
    tables = torch.zeros(len(lengths), CONTEXT // block_size, dtype=torch.int32)
    for row, length in enumerate(lengths):
        blocks = [order.pop() for _ in range(needed[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(length - 1):
            keys[blocks[position // block_size], position % block_size] = torch.randn(kv_heads, dim)
            values[blocks[position // block_size], position % block_size] = torch.randn(kv_heads, dim)
    angles = torch.rand(CONTEXT, dim // 2, device=DEVICE) * 6
    norms = [Norm((torch.rand(dim) + 0.5).to(DEVICE, dtype), EPS) if normed else None for _ in range(2)]
    unused = Linear(torch.empty(0), None)
    attention = AttentionShape(heads, kv_heads, dim, dim**-0.5)
    weights = Attention(attention, window, Norm(torch.empty(0), EPS), unused, norms[0], norms[1], unused)
    return Rows(
        torch.randn(len(lengths), (heads + 2 * kv_heads) * dim).to(DEVICE, dtype),
        keys.to(DEVICE, dtype),
        values.to(DEVICE, dtype),
        tables.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        weights,
        RopeTable(angles.cos().contiguous(), angles.sin().contiguous()),
    )


def attend(rows: Rows, plan: AttentionPlan, *, dependent: bool = False) -> torch.Tensor:
    """[rows, heads, dim]. Work is cut for two windows, of which the second is the rows' own."""
    count, shape = rows.seq_lens.shape[0], rows.weights.shape
    table, token_ids = torch.randn(9, 48, device=DEVICE), torch.randint(0, 9, (count,), device=DEVICE)
    residual = torch.full((count, 48), float("nan"), device=DEVICE)
    windows = torch.tensor([7, rows.weights.window], dtype=torch.int32, device=DEVICE)
    work = begin_decode(token_ids, table, residual, rows.seq_lens, windows, plan)
    assert torch.equal(residual, table[token_ids])
    work.items[1, int(work.total[1, 0]) :] = NOTHING
    buffers = make_part_buffers(count, shape, plan, CONTEXT, DEVICE)
    buffers.partial.fill_(float("nan"))
    out = torch.full((count, shape.q_size), float("nan"), dtype=rows.qkv.dtype, device=DEVICE)
    decode_attention(
        rows.qkv, out, rows.keys, rows.values, rows.tables, rows.seq_lens, work.items[1], work.total[1], rows.rope,
        rows.weights, plan, buffers, dependent=dependent,
    )  # fmt: skip
    assert not buffers.arrived.any(), "the counters of parts are as they were"
    return out.view(count, shape.heads, shape.head_dim)


def rotated(x: torch.Tensor, norm: Norm | None, rope: RopeTable, position: int) -> torch.Tensor:
    """Heads [n, dim] in float64."""
    x = x.double()
    if norm is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    cos, sin = rope.cos[position].double(), rope.sin[position].double()
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def expected_of(rows: Rows, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of a row, [heads, dim], and its newest key and value, [kv_heads, dim], in float64."""
    shape, position = rows.weights.shape, int(rows.seq_lens[row]) - 1
    heads = rows.qkv[row].view(-1, shape.head_dim).split([shape.heads, shape.kv_heads, shape.kv_heads])
    query = rotated(heads[0], rows.weights.q_norm, rows.rope, position)
    key, value = rotated(heads[1], rows.weights.k_norm, rows.rope, position), heads[2].double()
    first = max(0, position + 1 - rows.weights.window) if rows.weights.window else 0
    at = torch.arange(first, position, device=DEVICE)
    size, group = rows.keys.shape[1], shape.heads // shape.kv_heads
    blocks = rows.tables[row][at // size].long()
    keys = torch.cat([rows.keys[blocks, at % size].double(), key[None]]).repeat_interleave(group, 1)
    values = torch.cat([rows.values[blocks, at % size].double(), value[None]]).repeat_interleave(group, 1)
    scores = bounded(torch.einsum("hd,thd->ht", query * shape.scale, keys), rows.weights.score_cap)
    weights = scores.softmax(-1)
    return torch.einsum("ht,thd->hd", weights, values), key, value


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("shape", "window", "normed", "dtype"),
    [
        (SHAPES[0], 0, False, torch.float32),
        (SHAPES[0], 50, True, torch.bfloat16),
        (SHAPES[1], 0, True, torch.float32),
        (SHAPES[2], 500, False, torch.bfloat16),
        (SHAPES[3], 20, True, torch.bfloat16),
        pytest.param(SHAPES[0], 0, False, torch.bfloat16, marks=pytest.mark.large),
        pytest.param(SHAPES[0], 50, True, torch.float32, marks=pytest.mark.large),
        pytest.param(SHAPES[1], 0, True, torch.bfloat16, marks=pytest.mark.large),
        pytest.param(SHAPES[2], 500, False, torch.float32, marks=pytest.mark.large),
        pytest.param(SHAPES[3], 20, True, torch.float32, marks=pytest.mark.large),
    ],
)
def test_ragged_rows_and_the_newest_token_of_each(
    plan: AttentionPlan, dtype: torch.dtype, shape: tuple[int, int, int, int], window: int, normed: bool
) -> None:
    torch.manual_seed(1)
    rows = make_rows(LENGTHS, shape, dtype, window=window, normed=normed)
    before = rows.keys.clone()
    out = attend(rows, plan)
    assert not out[LENGTHS.index(0)].any(), "a masked row gets zeros"
    written = torch.zeros(rows.keys.shape[:2], dtype=torch.bool, device=DEVICE)
    for row, length in enumerate(LENGTHS):
        if length:
            expected, key, value = expected_of(rows, row)
            assert relative_error(out[row], expected) < ERROR[dtype]
            home = int(rows.tables[row, (length - 1) // shape[3]]), (length - 1) % shape[3]
            assert relative_error(rows.keys[home], key) < ERROR[dtype]
            assert torch.equal(rows.values[home].double(), value)
            written[home] = True
    unwritten = rows.keys[~written], before[~written]
    assert torch.equal(unwritten[0].nan_to_num(7.0), unwritten[1].nan_to_num(7.0)), "nothing else is written"


@pytest.mark.parametrize("group", [1, 3, 8, 40])
@pytest.mark.parametrize("window", [0, 75])
def test_a_row_has_the_same_bits_however_many_parts_an_item_has(window: int, group: int) -> None:
    torch.manual_seed(3)
    lengths = [100, 40, 200, 0, 265, 49, 48, 97] if group > 1 else [77, 0, 530, 49, 48]  # more parts than there may be
    rows = make_rows(lengths, SHAPES[0], DTYPES[0], window=window, normed=True)
    in_groups = AttentionPlan(16, group, programs=7, warps=1, stages=3, early=False)
    together = attend(rows.only(list(range(len(lengths)))), in_groups)
    for plan in (
        replace(in_groups, early=True, programs=50),
        replace(in_groups, room=8, programs=5),
        replace(in_groups, room=18, programs=50, early=True),
        replace(in_groups, room=400, programs=50, stages=2),
    ):
        assert torch.equal(attend(rows.only(list(range(len(lengths)))), plan), together)


@pytest.mark.parametrize("plan", PLANS)
def test_a_row_has_the_same_bits_whatever_its_neighbours(plan: AttentionPlan) -> None:
    torch.manual_seed(2)
    dtype = DTYPES[1]
    rows = make_rows([200, 77, 400, 0, 513], SHAPES[0], dtype)
    together = attend(rows.only([0, 1, 2, 3, 4]), plan)
    for others in ([0, 1, 3, 3, 3], [4, 0, 2, 1, 3], [3, 3, 1, 3, 0]):
        found = attend(rows.only(others), plan)
        for place, row in enumerate(others):
            assert torch.equal(found[place], together[row])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("length", [1, 2, 400])
def test_a_key_that_is_not_finite_reaches_the_result_of_its_row_alone(plan: AttentionPlan, length: int) -> None:
    torch.manual_seed(3)
    rows = make_rows([40, length, 90], SHAPES[0], torch.float32)
    heads, kv_heads, dim, _ = SHAPES[0]
    rows.qkv[1, heads * dim] = float("nan")  # in the newest key of the first KV head
    out = attend(rows, plan)
    assert bool(out[1, : heads // kv_heads].isnan().all())
    assert bool(out[0].isfinite().all()) and bool(out[2].isfinite().all())


def test_a_row_is_cut_by_its_own_length_into_a_bounded_number_of_parts() -> None:
    lengths = torch.tensor([0, 1, 17, 18, 16 * MAX_PARTS + 1, 16 * MAX_PARTS + 2, 100_000], dtype=torch.int32)
    plan = AttentionPlan(tile=16, group=2, programs=4, warps=1, stages=1, early=False, room=100)
    table = torch.randn(2, 16, device=DEVICE)
    work = begin_decode(
        torch.zeros(7, dtype=torch.int64, device=DEVICE), table, torch.empty(7, 16, device=DEVICE), lengths.to(DEVICE),
        torch.tensor([0, 20], dtype=torch.int32, device=DEVICE), plan,
    )  # fmt: skip
    items = [some[:count].tolist() for some, (count, *_) in zip(work.items, work.total.tolist(), strict=True)]
    parts = [[sum(item[0] == row for item in some) for row in range(7)] for some in items]
    assert all(len(item) == RECORD for some in items for item in some)
    assert all(sorted(item[7] for item in some) == list(range(len(some))) for some in items), "each has a place"
    in_places = [sorted(some, key=lambda item: item[7]) for some in items]
    assert all(some == sorted(some) for some in in_places), "rows in order, and a row's items in order"
    tiles = [[(item[2] + 15) // 16 - item[1] // 16 for item in some] for some in items]
    assert all(some == sorted(some, reverse=True) for some in tiles[1:]), "the longest items come first"
    assert all(item[4] == parts[kind][item[0]] for kind, some in enumerate(items) for item in some)
    assert parts[0] == [1, 1, 1, 2, MAX_PARTS, 17, 32]
    assert max(parts[1]) == 3, "a window of 20 tokens lies in 3 tiles of 16 at most"
    assert plan.parts(100_000) == MAX_PARTS and plan.parts(17) == 2


@pytest.mark.parametrize(
    ("room", "together"), [(24, 1), (23, 2), (13, 2), (12, 3), (10, 3), (9, 4), (8, 4), (7, 5), (6, 5), (5, 8), (3, 8)]
)
def test_an_item_has_the_fewest_parts_with_which_all_items_run_at_a_time(room: int, together: int) -> None:
    lengths = torch.tensor([9 * 16, 0, 4 * 16 - 3, 10 * 16], dtype=torch.int32, device=DEVICE)
    plan = AttentionPlan(tile=16, group=8, programs=4, warps=1, stages=1, early=False, room=room)
    windows, nothing = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    table = torch.zeros((1, 16), device=DEVICE)
    work = begin_decode(nothing, table, table, lengths, windows.to(DEVICE), plan)
    count, found, *_ = work.total[0].tolist()
    assert found == together
    parts = [9, 1, 4, 10]
    assert count == sum(-(-some // together) for some in parts)
    items = sorted(work.items[0, :count].tolist(), key=lambda item: (item[0], item[1]))
    sums = parts if together < 8 else [-(-some // 8) for some in parts]
    assert [item[4] for item in items] == [sums[item[0]] for item in items]
    places = [sum(sums[:row]) + at for row in range(4) for at in range(0, sums[row], together if together < 8 else 1)]
    assert [item[7] for item in items] == places
    assert sum(sums) <= plan.sums(4, 10 * 16)


def test_sums_have_room_for_each_smaller_launch() -> None:
    plan = AttentionPlan(tile=64, group=16, programs=264, warps=4, stages=5, early=False, room=33)
    for context in (64, 1024, 131_072):
        found = [plan.sums(rows, context) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)]
        assert found == sorted(found)
    assert plan.sums(1, 131_072) == MAX_PARTS
    assert plan.sums(32, 131_072) == plan.sums(64, 131_072) == 15 * 33
    assert plan.sums(1024, 131_072) == 2 * 1024, "sums of groups alone"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="only the interpreter shows what runs before a wait")
def test_attention_without_an_item_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a mixed launch without decode rows. The end of a kernel implies the end of all before it."""
    rows, plan = make_rows([40], SHAPES[0], torch.float32), PLANS[0]
    starts, tokens = torch.tensor([0, 2], dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    work = begin_decode(
        tokens, torch.randn(2, 16), torch.empty(2, 16), rows.seq_lens, torch.zeros(1, dtype=torch.int32), plan,
        query_start_loc=starts, chunk_lens=torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip
    assert int(work.total[0, 0]) == 0
    buffers = make_part_buffers(1, rows.weights.shape, plan, CONTEXT, DEVICE)
    out = torch.full((2, rows.weights.shape.q_size), float("nan"))

    def run() -> None:
        decode_attention(
            rows.qkv, out, rows.keys, rows.values, rows.tables, rows.seq_lens, work.items[0], work.total[0], rows.rope,
            rows.weights, plan, buffers, dependent=False, query_start_loc=starts, ragged=True,
        )  # fmt: skip

    check(monkeypatch, decode, [rows.qkv], [out, rows.keys, rows.values], run, 1)


def test_the_longest_items_come_first() -> None:
    lengths = [49, 9 * 16 + 1, 33, 65, 0]
    plan = AttentionPlan(tile=16, group=4, programs=4, warps=1, stages=1, early=False)
    work = begin_decode(
        torch.zeros(5, dtype=torch.int64, device=DEVICE), torch.randn(2, 16, device=DEVICE),
        torch.empty(5, 16, device=DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        torch.tensor([0], dtype=torch.int32, device=DEVICE), plan,
    )  # fmt: skip
    items = work.items[0, : int(work.total[0, 0])].tolist()
    assert [(item[2] + 15) // 16 - item[1] // 16 for item in items] == [4, 4, 4, 3, 2, 1, 0]
    assert [item[0] for item in items] == [1, 1, 3, 0, 2, 1, 4]


@pytest.mark.gpu
@pytest.mark.skipif(not dependent_launch_works(), reason="this GPU knows no programmatic dependent launch")
@pytest.mark.parametrize("plan", PLANS)
def test_launched_dependently_the_bits_are_the_same(plan: AttentionPlan) -> None:
    torch.manual_seed(4)
    rows = make_rows(LENGTHS, SHAPES[2], torch.bfloat16, normed=True)
    everybody = list(range(len(LENGTHS)))
    expected = attend(rows.only(everybody), plan)
    for _ in range(5):
        assert torch.equal(attend(rows.only(everybody), plan, dependent=True), expected)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("window", [0, 50])
def test_rows_of_one_token_in_a_mixed_launch_get_what_a_decode_launch_gives_and_others_nothing(
    window: int, plan: AttentionPlan
) -> None:
    torch.manual_seed(4)
    lengths, counts = [200, 77, 0, 400, 33, 0], [1, 30, 1, 1, 2, 0]
    decodes = [row for row, count in enumerate(counts) if count == 1]
    rows = make_rows(lengths, SHAPES[0], DTYPES[1], window=window, normed=True)
    alone = rows.only(decodes)
    expected = attend(alone, plan)

    starts = torch.tensor([0, *counts]).cumsum(0).to(DEVICE, torch.int32)
    tokens = sum(counts) + 3  # the last ones belong to no row
    shape, mixed = rows.weights.shape, rows.only(list(range(len(lengths))))
    qkv = torch.full((tokens, rows.qkv.shape[1]), float("nan"), dtype=rows.qkv.dtype, device=DEVICE)
    first = starts[:-1].long()[decodes]
    qkv[first] = rows.qkv[decodes]
    table, token_ids = torch.randn(9, 48, device=DEVICE), torch.randint(0, 9, (tokens,), device=DEVICE)
    residual, chunk_lens = torch.empty((tokens, 48), device=DEVICE), torch.full_like(rows.seq_lens, -1)
    windows = torch.tensor([7, window], dtype=torch.int32, device=DEVICE)
    work = begin_decode(
        token_ids, table, residual, rows.seq_lens, windows, plan, query_start_loc=starts, chunk_lens=chunk_lens
    )
    assert torch.equal(residual, table[token_ids])
    assert chunk_lens.tolist() == [length if count != 1 else 0 for length, count in zip(lengths, counts, strict=True)]
    out = torch.full((tokens, shape.q_size), 7.0, dtype=rows.qkv.dtype, device=DEVICE)
    decode_attention(
        qkv, out, mixed.keys, mixed.values, rows.tables, rows.seq_lens, work.items[1], work.total[1], rows.rope,
        rows.weights, plan, make_part_buffers(len(lengths), shape, plan, CONTEXT, DEVICE), dependent=False,
        query_start_loc=starts, ragged=True,
    )  # fmt: skip
    assert torch.equal(out[first].view_as(expected), expected)
    others = torch.ones(tokens, dtype=torch.bool, device=DEVICE)
    others[first] = False
    assert (out[others] == 7.0).all(), "tokens of chunks and of no row are left as they are"
    assert torch.equal(mixed.keys.nan_to_num(7.0), alone.keys.nan_to_num(7.0)), "the same keys are written"
