"""Products with FP8 matrices: each sum is one accumulator of the dequantized matrix, at every number of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.runtime.kernels.quantized_weights import GROUPS, quantized
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = pytest.mark.usefixtures("fp8_matrix_units")

from runahead.runtime.kernels.layers import Linear, Norm  # noqa: E402
from runahead.runtime.kernels.quantized_weight import QuantizedWeight  # noqa: E402
from runahead.runtime.kernels.triton.forward.unfused_products import one_sum, sums_of  # noqa: E402
from runahead.runtime.kernels.triton.gemm.cublaslt import choosing_products  # noqa: E402
from runahead.runtime.kernels.triton.gemm.fp8_gemm import (  # noqa: E402
    FP8_ROWS,
    Fp8Tiling,
    dequantized_in_16_bits,
    fp8_product,
    fp8_tiling,
)
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
    return Linear(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), bias, weight.panels())


def by_definition(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """One accumulator of the dequantized matrix."""
    sums = torch.empty((len(x), weight.shape[0]), dtype=torch.bfloat16, device=DEVICE)
    one_sum(x, Linear(weight.dequantized(), None), sums)
    return sums


def product(x: torch.Tensor, linear: Linear, tiling: Fp8Tiling | None = None) -> torch.Tensor:
    out = x.new_empty((len(x), linear.weight.shape[0]))
    fp8_product(x, linear, out, STORE, len(x), tiling)
    return out


@pytest.mark.parametrize("group", GROUPS, ids=IDS)
def test_the_matrix_in_16_bits_has_the_numbers_of_the_reference(group: int) -> None:
    weight = quantized(group, OUTPUTS, DEPTH, DEVICE)
    assert torch.equal(dequantized_in_16_bits(weight.panels()), weight.dequantized())


@pytest.mark.parametrize("group", GROUPS, ids=IDS)
def test_sums_are_those_of_one_accumulator_at_every_number_of_rows(group: int) -> None:
    weight = quantized(group, OUTPUTS, DEPTH, DEVICE)
    linear, x = linear_of(weight), batch(max(ROWS))
    expected = by_definition(x, weight)
    assert torch.equal(sums_of(x, linear), expected)
    for rows in ROWS:
        assert torch.equal(product(x[:rows], linear), expected[:rows]), rows


@pytest.mark.parametrize("group", GROUPS, ids=IDS)
def test_no_bit_depends_on_the_tiling(group: int) -> None:
    weight, x = quantized(group, OUTPUTS, DEPTH, DEVICE), batch(20)
    expected = by_definition(x, weight)
    for rows, columns, grains, warps in ((16, 16, 1, 1), (32, 32, 2, 2), (64, 16, 2, 4), (64, 32, 4, 4)):
        if group and grains > 2:
            continue
        found = product(x, linear_of(weight), Fp8Tiling(rows, columns, grains, 2, warps))
        assert torch.equal(found, expected), (rows, columns, grains)


def test_depths_that_a_block_does_not_divide_take_smaller_blocks() -> None:
    weight = quantized(0, 48, 192, DEVICE)
    assert fp8_tiling(48, 192, 192, 1).grains == 1
    x = batch(3, 192)
    assert torch.equal(product(x, linear_of(weight)), by_definition(x, weight))


def test_what_follows_a_product_has_the_bits_of_the_same_by_itself() -> None:
    """The norm before, the bias, the gate; and the sum with the residual and what its norm needs."""
    rows, hidden = 5, OUTPUTS
    draw = torch.Generator().manual_seed(4)
    bias = torch.randn(OUTPUTS, generator=draw).to(DEVICE, torch.bfloat16)
    x = torch.randn((rows, DEPTH), generator=draw).to(DEVICE, torch.bfloat16)
    linear = linear_of(quantized(0, OUTPUTS, DEPTH, DEVICE), bias)
    squares = torch.rand((3, 8), generator=draw, dtype=torch.float64).to(DEVICE) * DEPTH, 3, 1e-5
    gated = x.new_empty((rows, OUTPUTS // 2))
    fp8_product(x, linear, gated, GATED, rows, squares=squares)
    assert torch.equal(gated, finish_product(sums_of(x, linear), linear, squares, GATED))

    norm = Norm(torch.randn(hidden, generator=draw).to(DEVICE, torch.bfloat16), 1e-5)
    before = torch.randn((rows, hidden), generator=draw).to(DEVICE, torch.bfloat16)
    found, expected = (
        Residual(before.clone(), torch.empty_like(before), torch.zeros((8, 8), dtype=torch.float64, device=DEVICE))
        for _ in range(2)
    )
    tiles = fp8_product(x, linear, found.values, ADD, rows, norm=norm, residual=found)
    add_scaled(sums_of(x, linear), bias, expected.values, norm, expected.scaled, expected.squares)
    assert torch.equal(found.values, expected.values) and torch.equal(found.scaled, expected.scaled)
    assert torch.allclose(found.squares[:tiles, :rows].sum(0), expected.squares[0, :rows], rtol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS, ids=IDS)
def test_products_of_an_8b_model_have_one_order_at_every_number_of_rows(group: int) -> None:
    for outputs, depth in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
        weight, x = quantized(group, outputs, depth, DEVICE), batch(1024, depth)
        linear = linear_of(weight)
        expected = by_definition(x, weight)
        with choosing_products():
            for rows in (1, 8, 16, 33, 64, 130, 256, 1024):
                found = product(x[:rows], linear) if rows <= FP8_ROWS else sums_of(x[:rows], linear)
                assert torch.equal(found, expected[:rows]), (outputs, depth, rows)


def test_a_matrix_is_put_in_panels_once() -> None:
    weight = quantized(0, OUTPUTS, DEPTH, DEVICE)
    with pytest.raises(AssertionError):
        weight.panels().panels()
    with pytest.raises(AssertionError):
        weight.panels().dequantized()
    assert not replace(weight).in_panels
