"""Products with FP8 matrices: the definition, and the same bits at every number of rows and by every tiling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.runtime.kernels.quantized_weights import GROUPS, quantized
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = pytest.mark.usefixtures("fp8_matrix_units")

from runahead.runtime.kernels.layers import Linear, Norm  # noqa: E402
from runahead.runtime.kernels.quantized_weight import QuantizedWeight  # noqa: E402
from runahead.runtime.kernels.triton.forward.unfused_products import sums_of  # noqa: E402
from runahead.runtime.kernels.triton.gemm.cublaslt import choosing_products, vendor_library  # noqa: E402
from runahead.runtime.kernels.triton.gemm.fp8_gemm import FP8_ROWS, Fp8Tiling, fp8_product  # noqa: E402
from runahead.runtime.kernels.triton.gemm.fp8_rows import fp8_rows  # noqa: E402
from runahead.runtime.kernels.triton.gemm.gemv import ADD, GATED, STORE  # noqa: E402
from runahead.runtime.kernels.triton.gemm.separate_epilogue import add_scaled, finish_product  # noqa: E402
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import Residual  # noqa: E402

OUTPUTS, DEPTH = 80, 512
ROWS = (1, 2, 7, 16, 17, 40, 70)
IDS = ("channel", "blocks")


def batch(rows: int, depth: int = DEPTH) -> torch.Tensor:
    """Rows whose sums with the matrices of `quantized` cancel but for what rounding leaves: it shows their order."""
    half = torch.randn((rows, depth // 2), generator=torch.Generator().manual_seed(rows))
    return torch.cat((half, -half.flip(1)), 1).to(DEVICE, torch.bfloat16)


def linear_of(weight: QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
    return Linear(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), bias, weight.in_blocks())


def product(x: torch.Tensor, linear: Linear, tiling: Fp8Tiling | None = None) -> torch.Tensor:
    out = x.new_empty((len(x), linear.weight.shape[0]))
    fp8_product(fp8_rows(x, len(x)), linear, out, STORE, len(x), tiling)
    return out


def test_128_values_of_a_row_share_a_scale_and_no_other_row_changes_them() -> None:
    x = torch.randn((5, DEPTH), generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    x[2, 128:256] = 0.0
    found = fp8_rows(x, 5)
    blocks = x.float().view(5, -1, 128)
    scales = blocks.abs().amax(2) / 448.0
    assert torch.allclose(found.scales.t()[:5], scales, rtol=1e-6, atol=1e-20)
    made = found.numbers[:5].float().view(5, -1, 128) * found.scales.t()[:5, :, None]
    assert ((made - blocks).abs() <= blocks.abs() * 2**-4 + scales[:, :, None] * 2**-9).all()
    assert found.numbers[:5].float().abs().view(5, -1, 128).amax(2).eq(448.0).sum() == 19
    alone = fp8_rows(x[3:4].contiguous(), 1)
    assert torch.equal(alone.numbers[0].float(), found.numbers[3].float())
    assert torch.equal(alone.scales[:, 0], found.scales[:, 3])


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_value_that_is_not_finite_shows_in_the_products_of_its_row_alone(value: float) -> None:
    x = batch(3)
    x[1, 200] = value
    with np.errstate(invalid="ignore"):
        found = product(x, linear_of(quantized(0, OUTPUTS, DEPTH, DEVICE)))
    assert found.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("group", GROUPS, ids=IDS)
def test_sums_are_those_of_the_definition(group: int) -> None:
    """Sums of 128 columns, times the row's scale, rounded; times the weights' scale, added by one rounding."""
    weight = quantized(group, OUTPUTS, DEPTH, DEVICE)
    x = torch.randn((6, DEPTH), generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.bfloat16)
    rows, blocks = fp8_rows(x, 6), weight.in_blocks()
    acc = torch.zeros((6, OUTPUTS), dtype=torch.float32)
    numbers = weight.numbers.view(torch.float8_e4m3fn).double().cpu()
    for block in range(DEPTH // 128):
        columns = slice(128 * block, 128 * (block + 1))
        sums = (rows.numbers[:6, columns].double().cpu() @ numbers[:, columns].t()).float()
        scaled = sums * rows.scales[block, :6].cpu()[:, None]
        acc = (scaled.double() * blocks.scales[block].double().cpu() + acc.double()).float()
    found = product(x, linear_of(weight)).float().cpu()
    assert torch.allclose(found, acc, rtol=2**-7, atol=2**-9 * acc.abs().max().item())
    dequantized = x.float().cpu() @ weight.dequantized().float().cpu().t()
    assert (found - dequantized).norm() <= 0.05 * dequantized.norm()


@pytest.mark.parametrize("group", GROUPS, ids=IDS)
def test_no_bit_depends_on_the_number_of_rows_or_on_the_tiling(group: int) -> None:
    weight = quantized(group, OUTPUTS, DEPTH, DEVICE)
    linear, x = linear_of(weight), batch(max(ROWS))
    expected = sums_of(x, linear)
    assert expected.abs().max() > 0
    for rows in ROWS:
        assert torch.equal(product(x[:rows], linear), expected[:rows]), rows
    for rows, columns, stages in ((64, 16, 2), (128, 32, 3), (64, 64, 1)):
        assert torch.equal(product(x[:20], linear, Fp8Tiling(rows, columns, stages)), expected[:20]), (rows, columns)


def test_what_follows_a_product_has_the_bits_of_the_same_by_itself() -> None:
    """The norm before, the bias, the gate; and the sum with the residual and what its norm needs."""
    rows, hidden = 5, OUTPUTS
    draw = torch.Generator().manual_seed(4)
    bias = torch.randn(OUTPUTS, generator=draw).to(DEVICE, torch.bfloat16)
    x = torch.randn((rows, DEPTH), generator=draw).to(DEVICE, torch.bfloat16)
    linear = linear_of(quantized(0, OUTPUTS, DEPTH, DEVICE), bias)
    squares = torch.rand((3, 8), generator=draw, dtype=torch.float64).to(DEVICE) * DEPTH, 3, 1e-5
    gated = x.new_empty((rows, OUTPUTS // 2))
    fp8_product(fp8_rows(x, rows), linear, gated, GATED, rows, squares=squares)
    assert torch.equal(gated, finish_product(sums_of(x, linear), linear, squares, GATED))

    norm = Norm(torch.randn(hidden, generator=draw).to(DEVICE, torch.bfloat16), 1e-5)
    before = torch.randn((rows, hidden), generator=draw).to(DEVICE, torch.bfloat16)
    found, expected = (
        Residual(before.clone(), torch.empty_like(before), torch.zeros((8, 8), dtype=torch.float64, device=DEVICE))
        for _ in range(2)
    )
    tiles = fp8_product(fp8_rows(x, rows), linear, found.values, ADD, rows, norm=norm, residual=found)
    add_scaled(sums_of(x, linear), bias, expected.values, norm, expected.scaled, expected.squares)
    assert torch.equal(found.values, expected.values) and torch.equal(found.scaled, expected.scaled)
    assert torch.allclose(found.squares[:tiles, :rows].sum(0), expected.squares[0, :rows], rtol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS, ids=IDS)
def test_products_of_an_8b_model_have_one_order_at_every_number_of_rows_and_by_the_vendors_library(group: int) -> None:
    library = vendor_library()
    assert library is not None
    for outputs, depth in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
        linear, x = linear_of(quantized(group, outputs, depth, DEVICE)), batch(1024, depth)
        expected = product(x, linear)
        with choosing_products():
            for rows in (1, 8, 16, 33, 64, 130, 256, 1024):
                found = product(x[:rows], linear) if rows <= FP8_ROWS else sums_of(x[:rows], linear)
                assert torch.equal(found, expected[:rows]), (outputs, depth, rows)
    of_fp8 = [pinned for shape, pinned in library.pinned.items() if shape.dtype == torch.float8_e4m3fn]
    assert any(pinned is not None and pinned.choice in pinned.exact for pinned in of_fp8)
