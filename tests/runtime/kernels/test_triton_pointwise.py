"""Norms, rotation, the cache write and the embedding in Triton, against plain torch in
float64."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.kernels.triton_device import TOLERANCE, dtypes, relative_error, triton_device

DEVICE = triton_device()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from runahead.runtime.kernels.layers import Norm  # noqa: E402
from runahead.runtime.kernels.triton.attention.rope_and_cache import rotate_and_write  # noqa: E402
from runahead.runtime.kernels.triton.ops.embedding import embed  # noqa: E402
from runahead.runtime.kernels.triton.ops.norms import exact_square, rms_norm  # noqa: E402

EPS = 1e-5


@triton.jit
def _square_kernel(x, squares, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    tl.store(squares + i, exact_square(tl.load(x + i)))


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", dtypes(DEVICE))
@pytest.mark.parametrize("width", [64, 96, 1000])
def test_rms_norm_is_the_textbook_one(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(7, width, device=DEVICE).to(dtype)
    weight = torch.randn(width, device=DEVICE).to(dtype)
    assert relative_error(rms_norm(x, weight, EPS), normed(x, weight)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_order_of_squares_shows(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    n = 4096
    x = (torch.randn(n, device=DEVICE) * torch.logspace(-20, 4, n, base=2.0, device=DEVICE)).to(dtype)
    squares = torch.empty(n, dtype=torch.float64, device=DEVICE)
    _square_kernel[(1,)](x, squares, N=n)
    unit = 2.0**-30
    assert torch.equal(squares, (x.double() ** 2 / unit).round() * unit)


@pytest.mark.parametrize("dtype", dtypes(DEVICE))
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (6, 2, 24), (3, 3, 64)])
def test_queries_are_rotated_and_keys_and_values_land_in_their_slots(
    dtype: torch.dtype, with_norm: bool, heads: int, kv_heads: int, dim: int
) -> None:
    torch.manual_seed(4)
    tokens, block_size = 5, 8
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=DEVICE).to(dtype)
    angles = torch.randn(40, dim // 2, device=DEVICE)
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    positions = torch.tensor([0, 3, 39, 7, 1_000_000], device=DEVICE)
    slots = torch.tensor([8, 17, 31, 30, 0], device=DEVICE)
    keys = torch.full((4, block_size, kv_heads, dim), float("nan"), dtype=dtype, device=DEVICE)
    values = keys.clone()
    q_norm = Norm(torch.randn(dim, device=DEVICE).to(dtype), EPS) if with_norm else None
    k_norm = Norm(torch.randn(dim, device=DEVICE).to(dtype), EPS) if with_norm else None

    q = rotate_and_write(qkv, cos, sin, positions, slots, keys, values, heads, q_norm, k_norm)

    q_in, k_in, v_in = qkv.view(tokens, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], 1)
    at = positions.clamp(0, 39)
    for found, given, norm in ((q, q_in, q_norm), (keys.view(-1, kv_heads, dim)[slots], k_in, k_norm)):
        wide = normed(given, norm.weight) if norm is not None else given.double()
        low, high = wide.split(dim // 2, -1)
        c, s = cos[at].double()[:, None], sin[at].double()[:, None]
        expected = torch.cat([low * c - high * s, high * c + low * s], -1)
        assert relative_error(found, expected) < TOLERANCE[dtype]
    assert torch.equal(values.view(-1, kv_heads, dim)[slots], v_in)
    untouched = torch.ones(32, dtype=torch.bool)
    untouched[slots.cpu()] = False
    assert bool(keys.view(-1, kv_heads, dim)[untouched.to(DEVICE)].isnan().all())


@pytest.mark.parametrize("width", [48, 1500])
def test_the_embedding_is_a_row_of_the_table(width: int) -> None:
    torch.manual_seed(6)
    table = torch.randn(50, width, device=DEVICE)
    token_ids = torch.tensor([0, 49, 7, 7], device=DEVICE)
    assert torch.equal(embed(token_ids, table), table[token_ids])
