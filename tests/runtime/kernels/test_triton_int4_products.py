"""Products with INT4 matrices: the dequantized matrix's bits, one sum a segment, at every number of rows and tiling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.runtime.kernels.int4_weights import int4
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = pytest.mark.usefixtures("fp8_matrix_units")  # sums of 16 columns, rounded to bfloat16 as a GPU does

from runahead.runtime.kernels.layers import Activation, Linear, Norm  # noqa: E402
from runahead.runtime.kernels.quantized_weight import QuantizedWeight  # noqa: E402
from runahead.runtime.kernels.triton.forward.unfused_products import sums_of  # noqa: E402
from runahead.runtime.kernels.triton.gemm.cublaslt import choosing_products  # noqa: E402
from runahead.runtime.kernels.triton.gemm.epilogue import ADD, GATED, SQUARED, STORE  # noqa: E402
from runahead.runtime.kernels.triton.gemm.int4_gemm import (  # noqa: E402
    INT4_ROWS,
    Int4Tiling,
    in_16_bits,
    int4_batch_product,
    int4_product,
    takes_parts,
)
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import Residual, SplitScratch, small_batch_product  # noqa: E402
from runahead.runtime.kernels.triton.gemm.tuning import Tiling  # noqa: E402

OUTPUTS, DEPTH = 80, 512


def never(wanted: bool) -> bool:
    """No kernel is launched programmatically."""
    return False


ROWS = (1, 3, 8, 17, 64, 100, 130, INT4_ROWS + 2)
GROUPS = (32, 64, 128, 256, DEPTH)
FORMS = [
    pytest.param(group, scales, zeros, id=f"{group}-{scales}-{'zeros' if zeros else 'symmetric'}".replace("torch.", ""))
    for group in GROUPS
    for scales in (torch.bfloat16, torch.float16)
    for zeros in (False, True)
]
TILINGS = [Int4Tiling(16, 8, 3, 1), Int4Tiling(32, 16, 2, 2), Int4Tiling(64, 64, 2, 1)]


def batch(rows: int, depth: int = DEPTH) -> torch.Tensor:
    """Rows whose sums with the matrices of `int4` cancel but for what rounding leaves: it shows their order."""
    half = torch.randn((rows, depth // 2), generator=torch.Generator().manual_seed(rows))
    return torch.cat((half, -half.flip(1)), 1).to(DEVICE, torch.bfloat16)


def packed(weight: QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
    return Linear(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), bias, weight.panels())


def expected(x: torch.Tensor, linear: Linear, out: torch.Tensor, epilogue: int, splits: int = 1, **more: Any) -> None:
    """With the matrix in 16 bits."""
    tiling = Tiling(32 if epilogue == GATED else 64, 128, splits, 2, 4, dependent=False, spread=False)
    small_batch_product(x, linear, out, epilogue, tiling, None, len(x), chained=False, **more)


@pytest.mark.parametrize(("group", "scales", "zeros"), FORMS)
def test_a_matrix_in_panels_has_the_numbers_of_the_definition(group: int, scales: torch.dtype, zeros: bool) -> None:
    weight = int4(OUTPUTS, DEPTH, DEVICE, group, scales, zero_points=zeros)
    assert torch.equal(in_16_bits(packed(weight)).weight, weight.dequantized())
    of_float16 = weight.scales.float() != weight.scales.bfloat16().float()
    assert bool(of_float16.any()) == (scales == torch.float16), "float16 has scales that bfloat16 has not"


@pytest.mark.parametrize(("group", "scales", "zeros"), FORMS)
def test_a_product_has_the_bits_of_the_dequantized_matrix(group: int, scales: torch.dtype, zeros: bool) -> None:
    weight = int4(OUTPUTS, DEPTH, DEVICE, group, scales, zero_points=zeros)
    x = batch(17)
    out, found = (x.new_empty((17, OUTPUTS)) for _ in range(2))
    expected(x, Linear(weight.dequantized(), None), out, STORE)
    int4_product(x, packed(weight), found, STORE, 17)
    assert out.abs().max() > 0 and torch.equal(found, out)


@pytest.mark.parametrize("rows", ROWS)
def test_no_bit_depends_on_the_number_of_rows_or_on_the_tiling(rows: int) -> None:
    weight = int4(OUTPUTS, DEPTH, DEVICE)
    linear, x = packed(weight), batch(max(ROWS))
    out = x.new_empty((len(x), OUTPUTS))
    expected(x, Linear(weight.dequantized(), None), out, STORE)
    assert torch.equal(sums_of(x[:rows], linear, rows, never), out[:rows])
    for tiling in TILINGS if rows <= INT4_ROWS else ():
        found = x.new_full((rows, OUTPUTS), float("nan"))
        int4_product(x[:rows], linear, found, STORE, rows, 1, tiling)
        assert torch.equal(found, out[:rows]), tiling


@pytest.mark.parametrize("splits", [2, 4])
def test_parts_of_the_depth_are_summed_by_themselves(splits: int) -> None:
    weight = int4(OUTPUTS, 2 * DEPTH, DEVICE)
    x = batch(3, 2 * DEPTH)
    out, found, whole = (x.new_empty((3, OUTPUTS)) for _ in range(3))
    expected(x, Linear(weight.dequantized(), None), out, STORE, splits)
    int4_product(x, packed(weight), found, STORE, 3, splits)
    int4_product(x, packed(weight), whole, STORE, 3)
    assert torch.equal(found, out) and not torch.equal(whole, out)


def test_parts_that_are_no_whole_panels_and_many_rows_are_left_to_16_bits() -> None:
    linear = packed(int4(OUTPUTS, 3 * 128, DEVICE))
    assert takes_parts(linear, 1, INT4_ROWS) and takes_parts(linear, 3, 1)
    assert not takes_parts(linear, 2, 1) and not takes_parts(linear, 1, INT4_ROWS + 1)


@pytest.mark.parametrize("rows", [3, INT4_ROWS + 1])
def test_columns_in_the_order_of_activations_are_summed_in_the_order_of_their_groups(rows: int) -> None:
    weight, x = int4(OUTPUTS, DEPTH, DEVICE), batch(rows)
    order = torch.randperm(DEPTH, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    ordered = replace(weight, order=order)
    assert torch.equal(ordered.dequantized()[:, order], weight.dequantized())
    out, found = (x.new_empty((rows, OUTPUTS)) for _ in range(2))
    expected(x[:, order].contiguous(), Linear(weight.dequantized(), None), out, STORE)
    tiling = Tiling(64, 128, 1, 2, 4, dependent=False, spread=False)
    int4_batch_product(x, packed(ordered), found, STORE, tiling, SplitScratch(x, x), rows)
    assert torch.equal(found, out) and torch.equal(sums_of(x, packed(ordered), rows, never), out)


@pytest.mark.parametrize("epilogue", [STORE, GATED, SQUARED])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_what_follows_a_product_is_that_of_16_bits(epilogue: int, activation: Activation) -> None:
    """The norm before, the bias, the gate."""
    rows, draw = 5, torch.Generator().manual_seed(4)
    weight = int4(OUTPUTS, DEPTH, DEVICE, zero_points=True)
    bias = torch.randn(OUTPUTS, generator=draw).to(DEVICE, torch.bfloat16)
    x = torch.randn((rows, DEPTH), generator=draw).to(DEVICE, torch.bfloat16)
    squares = torch.rand((3, 8), generator=draw, dtype=torch.float64).to(DEVICE) * DEPTH, 3, 1e-5
    width = OUTPUTS // 2 if epilogue == GATED else OUTPUTS
    out, found = (x.new_empty((rows, width)) for _ in range(2))
    expected(x, Linear(weight.dequantized(), bias), out, epilogue, squares=squares, activation=activation)
    int4_product(x, packed(weight, bias), found, epilogue, rows, squares=squares, activation=activation)
    assert torch.equal(found, out)


@pytest.mark.parametrize("rows", [1, 20])
def test_the_residual_and_what_its_norm_needs_are_those_of_16_bits(rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    weight = int4(OUTPUTS, DEPTH, DEVICE)
    bias = torch.randn(OUTPUTS, generator=draw).to(DEVICE, torch.bfloat16)
    x = torch.randn((rows, DEPTH), generator=draw).to(DEVICE, torch.bfloat16)
    norm = Norm(torch.randn(OUTPUTS, generator=draw).to(DEVICE, torch.bfloat16), 1e-5)
    before = torch.randn((rows, OUTPUTS), generator=draw).to(DEVICE, torch.bfloat16)
    out, found = (
        Residual(before.clone(), torch.empty_like(before), torch.zeros((8, 32), dtype=torch.float64, device=DEVICE))
        for _ in range(2)
    )
    expected(x, Linear(weight.dequantized(), bias), out.values, ADD, norm=norm, residual=out)
    tiles = int4_product(x, packed(weight, bias), found.values, ADD, rows, norm=norm, residual=found)
    assert torch.equal(found.values, out.values) and torch.equal(found.scaled, out.scaled)
    assert torch.allclose(found.squares[:tiles, :rows].sum(0), out.squares[:2, :rows].sum(0), rtol=1e-12)


def test_more_rows_of_x_than_the_batch_has_are_neither_read_nor_written() -> None:
    weight, x = int4(OUTPUTS, DEPTH, DEVICE), batch(8)
    out = x.new_empty((3, OUTPUTS))
    int4_product(x[:3].contiguous(), packed(weight), out, STORE, 3)
    x[3:] = float("nan")
    found = x.new_full((8, OUTPUTS), 7.0)
    int4_product(x, packed(weight), found, STORE, 3)
    assert torch.equal(found[:3], out) and (found[3:] == 7.0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
def test_products_of_an_8b_model_are_those_of_16_bits(scales: torch.dtype) -> None:
    for outputs, depth in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
        weight = int4(outputs, depth, DEVICE, 128, scales, zero_points=scales == torch.float16)
        linear, plain, x = packed(weight), Linear(weight.dequantized(), None), batch(1024, depth)
        with choosing_products():
            for rows in (1, 8, 16, 33, 64, 100, 130, 256, 1024):
                out = sums_of(x[:rows], plain, rows, never)
                assert torch.equal(sums_of(x[:rows], linear, rows, never), out), (outputs, depth, rows)
                if rows <= INT4_ROWS:
                    found = torch.empty_like(out)
                    int4_product(x[:rows], replace(linear), found, STORE, rows)
                    assert torch.equal(found, out), (outputs, depth, rows)
