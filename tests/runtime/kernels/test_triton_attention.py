"""Attention of prompt chunks in Triton against a loop over rows in float64. Every free block and every tail is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.runtime.kernels.triton_device import TOLERANCE, dtypes, relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.triton.attention.ragged import chunk_attention  # noqa: E402

SHAPES = [(4, 2, 16, 8), (6, 1, 24, 16), (4, 4, 64, 16)]  # heads, KV heads, head_dim, block size


@dataclass
class Paged:
    """Rows of random keys and values, each in blocks of its own in random order."""

    keys: torch.Tensor  # [num_blocks, block_size, kv_heads, dim]
    values: torch.Tensor
    tables: torch.Tensor  # int32 [rows, max_blocks]
    seq_lens: torch.Tensor  # int32 [rows]


def paged(lengths: list[int], kv_heads: int, dim: int, block_size: int, max_blocks: int, dtype: torch.dtype) -> Paged:
    needed = [-(-length // block_size) for length in lengths]
    keys = torch.full((sum(needed) + 3, block_size, kv_heads, dim), float("nan"))
    values = keys.clone()
    order = (torch.randperm(sum(needed) + 2) + 1).tolist()
    tables = torch.zeros(len(lengths), max_blocks, dtype=torch.int32)
    for row, length in enumerate(lengths):
        blocks = [order.pop() for _ in range(needed[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks)
        for position in range(length):
            keys[blocks[position // block_size], position % block_size] = torch.randn(kv_heads, dim)
            values[blocks[position // block_size], position % block_size] = torch.randn(kv_heads, dim)
    return Paged(
        keys.to(DEVICE, dtype),
        values.to(DEVICE, dtype),
        tables.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
    )


def bounded(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * (x / cap).tanh() if cap else x


def attention_of(
    kv: Paged, row: int, q: torch.Tensor, position: int, scale: float, window: int, cap: float = 0.0
) -> torch.Tensor:
    """One query [heads, dim] at `position` of a row, in float64. cap: of the scores; 0: they have none."""
    first = max(0, position + 1 - window) if window else 0
    at = torch.arange(first, position + 1, device=DEVICE)
    block_size = kv.keys.shape[1]
    blocks = kv.tables[row][at // block_size].long()
    group = q.shape[0] // kv.keys.shape[2]
    k = kv.keys[blocks, at % block_size].double().repeat_interleave(group, 1)
    v = kv.values[blocks, at % block_size].double().repeat_interleave(group, 1)
    weights = bounded(torch.einsum("hd,thd->ht", q.double() * scale, k), cap).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, v)


@pytest.mark.parametrize("dtype", dtypes(DEVICE))
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), SHAPES)
def test_chunk_attention_of_chunks_and_decode_rows_together(
    dtype: torch.dtype, window: int, heads: int, kv_heads: int, dim: int, block_size: int
) -> None:
    torch.manual_seed(3)
    lengths, queries = [70, 1, 0, 40, 130, 0, 0], [70, 1, 1, 1, 45, 0, 0]  # the last two rows are padding
    kv = paged(lengths, kv_heads, dim, block_size, 256 // block_size, dtype)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    total, padding = int(starts[-1]), 11
    q = torch.randn(total + padding, heads, dim, device=DEVICE).to(dtype)
    out = chunk_attention(q, kv.keys, kv.values, kv.tables, kv.seq_lens, starts.to(DEVICE), dim**-0.5, window)
    for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        first = int(starts[row])
        if not length:
            assert not out[first].any(), "a masked row gets zeros, and so does a query token that no row has"
            continue
        expected = torch.stack(
            [attention_of(kv, row, q[first + i], length - count + i, dim**-0.5, window) for i in range(count)]
        )
        assert relative_error(out[first : first + count], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", dtypes(DEVICE))
def test_a_chunk_has_the_same_bits_whatever_its_neighbours(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    kv = paged([90, 50], 2, 32, 16, 32, dtype)
    q = torch.randn(90 + 20, 4, 32, device=DEVICE).to(dtype)
    starts = torch.tensor([0, 90, 110], dtype=torch.int32, device=DEVICE)
    together = chunk_attention(q, kv.keys, kv.values, kv.tables, kv.seq_lens, starts, 0.2, 0)
    alone = chunk_attention(
        q[90:].clone(),
        kv.keys,
        kv.values,
        kv.tables[1:].clone(),
        kv.seq_lens[1:].clone(),
        torch.tensor([0, 20], dtype=torch.int32, device=DEVICE),
        0.2,
        0,
    )
    assert torch.equal(alone, together[90:])
