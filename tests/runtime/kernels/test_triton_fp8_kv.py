"""Kernels over FP8 keys and values: what they write against the definition, what they read against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.runtime.kernels.triton_device import TOLERANCE, relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import AttentionShape, Norm, RopeTable  # noqa: E402
from runahead.runtime.kernels.triton.attention.prefill import prefill_attention  # noqa: E402
from runahead.runtime.kernels.triton.attention.prefill_schedule import cut_chunks  # noqa: E402
from runahead.runtime.kernels.triton.attention.prefill_tuning import ChunkPlan  # noqa: E402
from runahead.runtime.kernels.triton.attention.ragged import chunk_attention  # noqa: E402
from runahead.runtime.kernels.triton.attention.rope_and_cache import rotate_and_write  # noqa: E402
from runahead.runtime.kernels.triton.attention.schedule import AttentionPlan  # noqa: E402
from tests.runtime.kernels import test_triton_line_attention as lines  # noqa: E402
from tests.runtime.kernels.fp8_kv import FP8, LARGEST, kept, random_scales, read  # noqa: E402
from tests.runtime.kernels.test_triton_attention import Paged, attention_of, paged  # noqa: E402
from tests.runtime.kernels.test_triton_decode_attention import (  # noqa: E402
    ERROR,
    LENGTHS,
    PLANS,
    Rows,
    attend,
    make_rows,
    rotated,
)

NAN, INF = float("nan"), float("inf")
# Heads, KV heads, head_dim, block size; window; head norms; dtype of queries.
CASES = [
    ((4, 2, 16, 8), 0, False, torch.float32),
    ((6, 1, 24, 16), 50, True, torch.float32),
    ((4, 4, 64, 16), 0, True, torch.bfloat16),
    ((4, 2, 128, 16), 500, False, torch.bfloat16),
]
COPYING = ChunkPlan(lines=32, keys=32, programs=5, warps=4, stages=2, copiers=1)


def in_fp8(rows: Rows) -> Rows:
    """The same rows with FP8 keys and values, and scales for each head."""
    scales = random_scales(rows.weights.shape.kv_heads).to(DEVICE)
    keys, values = (kept(x, scale).view(FP8) for x, scale in zip((rows.keys, rows.values), scales, strict=True))
    return replace(rows, keys=keys, values=values, weights=replace(rows.weights, kv_scales=scales))


def read_back(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the cache, float32."""
    assert rows.weights.kv_scales is not None
    keys, values = (read(x, scale) for x, scale in zip((rows.keys, rows.values), rows.weights.kv_scales, strict=True))
    return keys, values


def few_differ(bits: torch.Tensor, expected: torch.Tensor) -> None:
    """Near ties between two FP8 numbers may be rounded to the other one."""
    bits, expected = bits.view(torch.uint8).int().cpu(), expected.view(torch.uint8).int().cpu()
    assert int((bits - expected).abs().max()) <= 1
    assert float((bits != expected).float().mean()) < 0.01


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("shape", "window", "normed", "dtype"), CASES)
def test_decode_rows_read_what_the_definition_keeps_their_newest_token_included(
    plan: AttentionPlan, shape: tuple[int, int, int, int], window: int, normed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    rows = in_fp8(make_rows(LENGTHS, shape, dtype, window=window, normed=normed))
    weights, scales = rows.weights, rows.weights.kv_scales
    assert scales is not None
    out = attend(rows, plan)
    keys, values = read_back(rows)
    for row, length in enumerate(LENGTHS):
        if not length:
            assert not out[row].any()
            continue
        heads = rows.qkv[row].view(-1, shape[2]).split([shape[0], shape[1], shape[1]])
        home = int(rows.tables[row, (length - 1) // shape[3]]), (length - 1) % shape[3]
        few_differ(rows.keys[home], kept(rotated(heads[1], weights.k_norm, rows.rope, length - 1), scales[0]))
        assert torch.equal(rows.values[home].view(torch.uint8), kept(heads[2], scales[1]))
        query = rotated(heads[0], weights.q_norm, rows.rope, length - 1)
        kv = Paged(keys, values, rows.tables, rows.seq_lens)
        expected = attention_of(kv, row, query, length - 1, weights.shape.scale, window)
        assert relative_error(out[row], expected) < ERROR[dtype]


@pytest.mark.parametrize("plan", PLANS)
def test_a_row_has_the_same_bits_whatever_its_neighbours(plan: AttentionPlan) -> None:
    torch.manual_seed(3)
    rows = in_fp8(make_rows([200, 77, 400, 0, 513], CASES[0][0], torch.bfloat16))
    together = attend(rows.only([0, 1, 2, 3, 4]), plan)
    for others in ([0, 1, 3, 3, 3], [4, 0, 2, 1, 3], [3, 3, 1, 3, 0]):
        found = attend(rows.only(others), plan)
        for place, row in enumerate(others):
            assert torch.equal(found[place], together[row])


@pytest.mark.parametrize("group", [1, 2, 40])
def test_a_row_has_the_same_bits_however_many_parts_an_item_has(group: int) -> None:
    torch.manual_seed(4)
    rows = in_fp8(make_rows([200, 77, 400, 0, 530, 49], CASES[0][0], torch.float32))
    in_groups = AttentionPlan(16, group, programs=7, warps=1, stages=3, early=False)
    together = attend(rows.only(list(range(6))), in_groups)
    for room in (20, 100):
        assert torch.equal(attend(rows.only(list(range(6))), replace(in_groups, room=room, programs=5)), together)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("number", [NAN, INF])
def test_a_key_that_is_not_finite_reaches_the_result_of_its_row_alone(plan: AttentionPlan, number: float) -> None:
    torch.manual_seed(5)
    heads, kv_heads, dim, _ = CASES[0][0]
    rows = in_fp8(make_rows([40, 300, 90], CASES[0][0], torch.float32))
    rows.qkv[1, heads * dim] = number  # in the newest key of the first KV head
    out = attend(rows, plan)
    assert bool(out[1, : heads // kv_heads].isnan().all())
    assert bool(out[0].isfinite().all()) and bool(out[2].isfinite().all())


@pytest.mark.parametrize(("shape", "dtype"), [(case[0], case[3]) for case in CASES])
def test_the_kernel_that_rotates_keeps_rounded_numbers_and_bounds_large_ones(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(6)
    heads, kv_heads, dim, block_size = shape
    tokens, scales = 40, random_scales(kv_heads).to(DEVICE)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=DEVICE).to(dtype)
    v = qkv.view(tokens, -1, dim)[:, heads + kv_heads :]
    v[0, 0, :4] = torch.tensor([1e30, -1e30, INF, NAN])
    angles = torch.rand(64, dim // 2, device=DEVICE) * 6
    rope = RopeTable(angles.cos().contiguous(), angles.sin().contiguous())
    slots = torch.randperm(3 * tokens, device=DEVICE)[:tokens] + block_size
    keys = torch.zeros((4 * tokens // block_size + 1, block_size, kv_heads, dim), device=DEVICE).to(FP8)
    values, norm = keys.clone(), Norm((torch.rand(dim) + 0.5).to(DEVICE, dtype), 1e-5)
    positions = torch.arange(tokens, device=DEVICE)
    rotate_and_write(qkv, rope.cos, rope.sin, positions, slots, keys, values, heads, norm, norm, scales)
    found = values.view(-1, kv_heads, dim)[slots]
    assert torch.equal(found.view(torch.uint8), kept(v, scales[1]))
    largest, smallest, *others = found[0, 0, :4].float().tolist()
    assert (largest, smallest) == (LARGEST, -LARGEST) and all(other != other for other in others)
    k = qkv.view(tokens, -1, dim)[:, heads : heads + kv_heads]
    expected = torch.stack([rotated(k[i], norm, rope, i) for i in range(tokens)])
    few_differ(keys.view(-1, kv_heads, dim)[slots], kept(expected, scales[0]))


@pytest.mark.parametrize("plan", [None, lines.WHOLE, COPYING], ids=["small", "whole", "copies"])
@pytest.mark.parametrize(("shape", "window"), [((4, 2, 16, 8), 0), ((6, 2, 24, 16), 20), ((2, 2, 64, 16), 0)])
def test_chunks_read_what_the_definition_keeps_in_every_form(
    shape: tuple[int, int, int, int], window: int, plan: ChunkPlan | None
) -> None:
    torch.manual_seed(7)
    heads, kv_heads, dim, block_size = shape
    scales = random_scales(kv_heads).to(DEVICE)
    plain = paged(lines.LENGTHS, kv_heads, dim, block_size, 256 // block_size, torch.float32)
    keys, values = (kept(x, scale) for x, scale in zip((plain.keys, plain.values), scales, strict=True))
    dtype = torch.bfloat16 if plan is COPYING else torch.float32
    q = lines.random_queries(sum(lines.QUERIES), heads, dim, dtype)
    batch = lines.batch_of(plain, lines.QUERIES)
    if plan is None:
        out = chunk_attention(
            q, keys.view(FP8), values.view(FP8), plain.tables, plain.seq_lens, batch.query_start_loc, dim**-0.5, window,
            0.0, scales,
        )  # fmt: skip
    else:
        work = cut_chunks(batch, AttentionShape(heads, kv_heads, dim, dim**-0.5), plan)
        fp8 = keys.view(FP8), values.view(FP8)
        out = prefill_attention(q, *fp8, batch, dim**-0.5, window, plan, work, 0.0, scales)
    kv = Paged(read(keys, scales[0]), read(values, scales[1]), plain.tables, plain.seq_lens)
    first = 0
    for row, (length, count) in enumerate(zip(lines.LENGTHS, lines.QUERIES, strict=True)):
        if length:
            expected = torch.stack(
                [attention_of(kv, row, q[first + i], length - count + i, dim**-0.5, window) for i in range(count)]
            )
            assert (
                relative_error(out[first : first + count], expected)
                < (ERROR if DEVICE.type == "cpu" else TOLERANCE)[dtype]
            )
        first += count
