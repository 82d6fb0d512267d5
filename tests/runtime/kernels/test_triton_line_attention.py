"""Attention of prompt chunks in large tiles against a loop over rows in float64. Every free block and tail is NaN."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import TOLERANCE, dtypes, relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache  # noqa: E402
from runahead.runtime.kernels.layers import Attention, AttentionShape, RopeTable  # noqa: E402
from runahead.runtime.kernels.triton.attention import prefill_tuning, ragged  # noqa: E402
from runahead.runtime.kernels.triton.attention.prefill import prefill_attention  # noqa: E402
from runahead.runtime.kernels.triton.attention.prefill_hopper import HEAD_DIMS  # noqa: E402
from runahead.runtime.kernels.triton.attention.prefill_schedule import ChunkWork, cut_chunks  # noqa: E402
from runahead.runtime.kernels.triton.attention.prefill_tuning import ChunkPlan, chunk_plan  # noqa: E402
from runahead.runtime.kernels.triton.gpu.capability import Gpu  # noqa: E402
from tests.runtime.kernels.test_triton_attention import Paged, attention_of, paged  # noqa: E402

SHAPES = [(4, 2, 16, 8), (6, 2, 24, 16), (2, 2, 32, 16)]  # heads, KV heads, head_dim, block size
WHOLE = ChunkPlan(lines=32, keys=32, programs=5, warps=4, stages=2)
NOTHING: Any = None  # of weights that attention does not read
LENGTHS, QUERIES = [70, 1, 0, 90, 130], [70, 1, 1, 1, 45]


def batch_of(kv: Paged, queries: list[int]) -> ForwardBatch:
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    unused = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    return ForwardBatch(
        token_ids=unused,
        positions=unused,
        slot_mapping=unused,
        query_start_loc=starts,
        seq_lens=kv.seq_lens,
        block_tables=kv.tables,
        num_tokens=sum(queries),
        num_rows=len(queries),
        max_seq_len=256,
        is_decode=False,
    )


def attend(
    q: torch.Tensor, kv: Paged, batch: ForwardBatch, window: int, plan: ChunkPlan, cap: float = 0.0
) -> torch.Tensor:
    dim = q.shape[2]
    work = cut_chunks(batch, AttentionShape(q.shape[1], kv.keys.shape[2], dim, dim**-0.5), plan)
    return prefill_attention(q, kv.keys, kv.values, batch, dim**-0.5, window, plan, work, cap)


def random_queries(count: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, heads, dim, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", dtypes(DEVICE))
@pytest.mark.parametrize("plan", [WHOLE, replace(WHOLE, programs=9)], ids=["few programs", "more"])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), SHAPES)
def test_chunks_and_decode_rows_together(
    dtype: torch.dtype, plan: ChunkPlan, window: int, heads: int, kv_heads: int, dim: int, block_size: int
) -> None:
    torch.manual_seed(3)
    kv = paged(LENGTHS, kv_heads, dim, block_size, 256 // block_size, dtype)
    q = random_queries(sum(QUERIES), heads, dim, dtype)
    out = attend(q, kv, batch_of(kv, QUERIES), window, plan)
    first = 0
    for row, (length, count) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        found = out[first : first + count]
        if length:
            expected = torch.stack(
                [attention_of(kv, row, q[first + i], length - count + i, dim**-0.5, window) for i in range(count)]
            )
            assert relative_error(found, expected) < TOLERANCE[dtype], row
        else:
            assert not found.any(), "a masked row gets zeros"
        first += count


def test_a_row_s_bits_hang_neither_on_its_neighbours_nor_on_how_long_its_chunk_is() -> None:
    torch.manual_seed(4)
    heads, kv_heads, dim, block_size = SHAPES[0]
    lengths = [90, 130, 7]
    kv = paged(lengths, kv_heads, dim, block_size, 256 // block_size, torch.float32)
    queries = [90, 45, 7]
    q = random_queries(sum(queries), heads, dim, torch.float32)
    together = attend(q, kv, batch_of(kv, queries), 0, WHOLE)
    first = 0
    for row, count in enumerate(queries):
        alone = Paged(kv.keys, kv.values, kv.tables[row : row + 1], kv.seq_lens[row : row + 1])
        mine = q[first : first + count]
        assert torch.equal(attend(mine, alone, batch_of(alone, [count]), 0, WHOLE), together[first : first + count])
        first += count


def test_a_row_s_last_tile_comes_first_and_a_masked_row_has_none() -> None:
    kv = paged([200, 0, 200], 1, 16, 16, 16, torch.float32)
    work = cut_chunks(batch_of(kv, [1, 5, 60]), AttentionShape(2, 1, 16, 0.25), WHOLE)
    # 16 tokens of two heads each
    assert work.items[: int(work.total)].tolist() == [[0, 0], *([2, tile] for tile in (3, 2, 1, 0))]


class Measured:
    """A GPU of this name, whose table has a plan for one shape."""

    SHAPE = AttentionShape(8, 2, 64, 0.125)
    PLAN = ChunkPlan(lines=128, keys=64, programs=132, warps=8, stages=2)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpu: Gpu | None) -> None:
        table = {"A GPU": {"8 heads, 2 KV heads of 64, bfloat16": asdict(self.PLAN)}}
        monkeypatch.setattr(prefill_tuning, "_tables", lambda: table)
        monkeypatch.setattr(prefill_tuning, "current_gpu", lambda: gpu)


GPU = Gpu("A GPU", (9, 0), 227 * 1024)


def test_what_was_measured_on_this_gpu_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch, GPU)
    assert chunk_plan(measured.SHAPE, torch.bfloat16) == measured.PLAN


@pytest.mark.parametrize(
    ("gpu", "shape", "dtype"),
    [
        (None, Measured.SHAPE, torch.bfloat16),
        (replace(GPU, name="Another"), Measured.SHAPE, torch.bfloat16),
        (replace(GPU, stands_for_older=True), Measured.SHAPE, torch.bfloat16),
        (GPU, replace(Measured.SHAPE, kv_heads=4), torch.bfloat16),
        (GPU, replace(Measured.SHAPE, scale=-0.125), torch.bfloat16),
        (GPU, Measured.SHAPE, torch.float16),
        (GPU, Measured.SHAPE, torch.float32),
    ],
    ids=["no gpu", "another gpu", "as an older one", "shape", "scale", "float16", "float32"],
)
def test_what_was_not_measured_has_no_plan(
    monkeypatch: pytest.MonkeyPatch, gpu: Gpu | None, shape: AttentionShape, dtype: torch.dtype
) -> None:
    Measured(monkeypatch, gpu)
    assert chunk_plan(shape, dtype) is None


def test_plans_in_the_table_are_plans() -> None:
    for gpu, plans in json.loads(prefill_tuning.TABLE.read_text()).items():
        for key, entry in plans.items():
            plan = ChunkPlan(**entry)
            powers = (plan.lines, plan.keys, plan.warps)
            assert all(number & (number - 1) == 0 for number in powers), (gpu, key)
            assert min(plan.programs, plan.stages) >= 1, (gpu, key)


def test_a_launch_is_cut_once_for_all_layers_of_a_shape_and_gives_what_it_gives_without_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = [70, 45]
    heads, kv_heads, dim, block_size = SHAPES[0]
    torch.manual_seed(5)
    seen: list[ChunkPlan] = []

    def watched(batch: ForwardBatch, shape: AttentionShape, plan: ChunkPlan) -> ChunkWork:
        seen.append(plan)
        return cut_chunks(batch, shape, plan)

    monkeypatch.setattr(ragged, "cut_chunks", watched)
    shape = AttentionShape(heads, kv_heads, dim, dim**-0.5)
    weights = Attention(shape, 0, NOTHING, NOTHING, None, None, NOTHING)
    rope = RopeTable(torch.ones((256, dim // 2), device=DEVICE), torch.zeros((256, dim // 2), device=DEVICE))
    found = []
    for plan in (None, WHOLE):
        monkeypatch.setattr(ragged, "chunk_plan", lambda shape, dtype, plan=plan: plan)
        torch.manual_seed(6)
        lengths = [70, 130]
        kv = paged(lengths, kv_heads, dim, block_size, 256 // block_size, torch.float32)
        of_rows = [torch.arange(length - count, length) for length, count in zip(lengths, counts, strict=True)]
        positions = torch.cat(of_rows).to(DEVICE)
        rows = torch.repeat_interleave(torch.tensor(counts)).to(DEVICE)
        slots = kv.tables[rows, positions // block_size].long() * block_size + positions % block_size
        batch = replace(batch_of(kv, counts), positions=positions, slot_mapping=slots)
        attention = ragged.ChunkAttention(batch, KVCache((kv.keys,), (kv.values,), block_size), [rope])
        qkv = torch.randn((115, (heads + 2 * kv_heads) * dim), device=DEVICE)
        found.append(attention.attended(qkv, weights, 0))
        assert torch.equal(attention.attended(qkv, weights, 0), found[-1])
    assert seen == [WHOLE]
    assert relative_error(found[1], found[0]) < TOLERANCE[torch.float32]


# ------------------------------------------------------------ on a GPU, as prompts are served there

LAUNCHES = {  # query tokens and lengths of each row
    "beside decode rows": ([1, 1, 300, 70, 1, 0], [1500, 33, 2300, 70, 1, 0]),
    "rows of one token": ([1, 600, 1], [3000, 700, 17]),
    "a prompt alone": ([513], [513]),
    "over a long cache": ([129], [9000]),
}
SERVED = [(32, 8, 128), (16, 8, 128), (32, 8, 64), (16, 8, 256), (32, 32, 96)]


def random_cache(lengths: list[int], kv_heads: int, dim: int, poison: float = float("nan")) -> Paged:
    """Rows of random keys and values in blocks of 16 tokens, in random order; `poison` wherever no row has a token."""
    blocks = [-(-length // 16) for length in lengths]
    tables = torch.zeros((len(lengths), max(*blocks, 1)), dtype=torch.int32)
    order = (torch.randperm(sum(blocks)) + 1).int().split(blocks)
    keys, values = (torch.randn(sum(blocks) + 1, 16, kv_heads, dim, dtype=torch.bfloat16) for _ in range(2))
    for row, mine in enumerate(order):
        tables[row, : len(mine)] = mine
        if lengths[row] % 16:
            keys[mine[-1], lengths[row] % 16 :] = poison
            values[mine[-1], lengths[row] % 16 :] = poison
    keys[0] = values[0] = poison
    return Paged(
        keys.to(DEVICE), values.to(DEVICE), tables.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    )


def plans(head_dim: int) -> Iterator[ChunkPlan]:
    """Tiles of two warpgroups, or of one with two programs a multiprocessor, as far as shared memory holds them."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    if head_dim in HEAD_DIMS:
        for keys, stages in ((128, 2), (128, 3), (64, 6)):
            yield ChunkPlan(128, keys, processors, 8, stages, copiers=1)
    pad = max(64, 1 << (head_dim - 1).bit_length())
    for (lines, warps, each), keys, stages in itertools.product(
        ((128, 8, 1), (64, 4, 2)), (32, 64) if pad > 128 else (64, 128), (2, 3)
    ):
        if each * (lines + 2 * keys * stages) * pad * 2 > 226 << 10 or (warps == 4 and pad > 128):
            continue
        yield ChunkPlan(lines, keys, each * processors, warps, stages)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SERVED)
def test_plans_of_all_sizes_give_what_attention_without_one_gives(
    heads: int, kv_heads: int, dim: int, launch: str, window: int
) -> None:
    torch.manual_seed(7)
    queries, lengths = LAUNCHES[launch]
    kv = random_cache(lengths, kv_heads, dim)
    q = random_queries(sum(queries), heads, dim, torch.bfloat16)
    batch = batch_of(kv, queries)
    expected = ragged.chunk_attention(
        q, kv.keys, kv.values, kv.tables, kv.seq_lens, batch.query_start_loc, dim**-0.5, window
    )
    for plan in plans(dim):
        assert relative_error(attend(q, kv, batch, window, plan), expected) < TOLERANCE[torch.bfloat16], plan


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_a_gpu_a_token_s_bits_hang_neither_on_its_neighbours_nor_on_where_its_chunk_began() -> None:
    torch.manual_seed(8)
    heads, kv_heads, dim = SERVED[0]
    kv = random_cache([900, 333, 40], kv_heads, dim)
    queries = [400, 1, 40]
    q = random_queries(sum(queries), heads, dim, torch.bfloat16)
    for plan in plans(dim):
        together = attend(q, kv, batch_of(kv, queries), 0, plan)
        first = 0
        for row, count in enumerate(queries):
            alone = Paged(kv.keys, kv.values, kv.tables[row : row + 1], kv.seq_lens[row : row + 1])
            for left in {count, max(count // 3, 1), 1}:  # the row's last so many query tokens alone
                mine = q[first + count - left : first + count]
                found = attend(mine, alone, batch_of(alone, [left]), 0, plan)
                assert torch.equal(found, together[first + count - left : first + count]), (plan, row, left)
            first += count


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_one_graph_of_it_serves_every_way_to_share_out_a_launch_s_tokens() -> None:
    torch.manual_seed(9)
    heads, kv_heads, dim = SERVED[0]
    kv = random_cache([900, 333, 40, 0], kv_heads, dim)
    q = random_queries(256, heads, dim, torch.bfloat16)
    for plan in list(plans(dim))[::2]:
        lengths, starts = torch.zeros_like(kv.seq_lens), torch.zeros(5, dtype=torch.int32, device=DEVICE)
        fixed = Paged(kv.keys, kv.values, kv.tables, lengths)
        batch = replace(batch_of(fixed, [256, 0, 0, 0]), query_start_loc=starts)
        attend(q, fixed, batch, 0, plan)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend(q, fixed, batch, 0, plan)
        for queries in ([200, 1, 40, 0], [1, 200, 1, 0], [100, 100, 40, 0], [0, 0, 40, 0]):
            asked = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
            starts.copy_(asked)
            lengths.copy_(torch.where(asked.diff().to(DEVICE) > 0, kv.seq_lens, 0))
            graph.replay()
            again = attend(q, fixed, batch, 0, plan)
            assert torch.equal(out[: sum(queries)], again[: sum(queries)]), (plan, queries)
            assert not out[: sum(queries)].isnan().any()
