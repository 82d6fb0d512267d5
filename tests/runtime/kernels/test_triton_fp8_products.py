"""Products with FP8 matrices: the definition, and the same bits at every number of rows and by every tiling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.runtime.kernels.quantized_weights import GROUPS, quantized, rows_through_fp8
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = pytest.mark.usefixtures("fp8_matrix_units")

from runahead.runtime.kernels.layers import Linear, Norm  # noqa: E402
from runahead.runtime.kernels.quantized_weight import Fp8Weight, QuantizedWeight  # noqa: E402
from runahead.runtime.kernels.triton.forward.unfused_products import sums_of  # noqa: E402
from runahead.runtime.kernels.triton.gemm import separate_epilogue  # noqa: E402
from runahead.runtime.kernels.triton.gemm.cublaslt import choosing_products, vendor_library  # noqa: E402
from runahead.runtime.kernels.triton.gemm.epilogue import GATED, STORE  # noqa: E402
from runahead.runtime.kernels.triton.gemm.fp8_gemm import fp8_product  # noqa: E402
from runahead.runtime.kernels.triton.gemm.fp8_rows import Fp8Rows  # noqa: E402
from runahead.runtime.kernels.triton.gemm.separate_epilogue import (  # noqa: E402
    add_scaled,
    finish_in_fp8,
    finish_product,
    fp8_rows,
)

OUTPUTS, DEPTH = 80, 512
ROWS = (1, 2, 7, 16, 17, 40, 70)
IDS = ("channel", "blocks")


def batch(rows: int, depth: int = DEPTH) -> torch.Tensor:
    """Rows whose sums with the matrices of `quantized` cancel but for what rounding leaves: it shows their order."""
    half = torch.randn((rows, depth // 2), generator=torch.Generator().manual_seed(rows))
    return torch.cat((half, -half.flip(1)), 1).to(DEVICE, torch.bfloat16)


def linear_of(weight: QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
    return Linear(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), bias, weight.for_gpu())


def sums_by_our_kernel(x: torch.Tensor, linear: Linear, columns: int = 0) -> torch.Tensor:
    """Return the accumulators. columns: as `fp8_product` has them."""
    out = x.new_empty((len(x), linear.weight.shape[0]))
    fp8_product(fp8_rows(x, len(x)), linear, out, len(x), columns)
    return out


def product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """A product's values."""
    return finish_product(sums_of(x, linear, len(x), lambda wanted: False), linear, None, STORE)


def test_128_values_of_a_row_share_a_scale_and_no_other_row_changes_them() -> None:
    x = torch.randn((5, DEPTH), generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    x[2, 128:256] = 0.0
    found = fp8_rows(x, 5)
    blocks = x.float().view(5, -1, 128)
    least = blocks.abs().amax(2) / 448.0
    scales = torch.where(least > 0, torch.exp2(torch.log2(least).ceil()), 2.0**-60)
    assert torch.equal(found.scales.t()[:5], scales), "powers of two"
    made = found.numbers[:5].float().view(5, -1, 128) * found.scales.t()[:5, :, None]
    assert ((made - blocks).abs() <= blocks.abs() * 2**-4 + scales[:, :, None] * 2**-9).all()
    assert torch.equal(made.view(5, DEPTH).cpu(), rows_through_fp8(x.cpu()))
    greatest = found.numbers[:5].float().abs().view(5, -1, 128).amax(2)
    assert ((greatest >= 224.0) & (greatest <= 448.0)).sum() == 19 and not greatest[2, 1]
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
    """Sums of 128 columns, times the scales of the row and of the block, added by one rounding; the accumulator,
    rounded, times the channel's scale."""
    outputs = 208
    weight = quantized(group, outputs, DEPTH, DEVICE)
    x = torch.randn((6, DEPTH), generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.bfloat16)
    rows = fp8_rows(x, 6)
    acc = torch.zeros((6, outputs), dtype=torch.float32)
    numbers = weight.numbers.view(torch.float8_e4m3fn).double().cpu()
    for block in range(DEPTH // 128):
        columns = slice(128 * block, 128 * (block + 1))
        sums = (rows.numbers[:6, columns].double().cpu() @ numbers[:, columns].t()).float()
        scales = weight.scales[block].float().cpu() if group else torch.ones(outputs)
        factors = scales * rows.scales[block, :6].cpu()[:, None]
        acc = (sums.double() * factors.double() + acc.double()).float()
    expected = acc.bfloat16().float() * (1.0 if group else weight.scales[0].float().cpu())
    found = product(x, linear_of(weight)).float().cpu()
    assert torch.allclose(found, expected, rtol=2**-7, atol=2**-9 * expected.abs().max().item())
    dequantized = x.float().cpu() @ weight.dequantized().float().cpu().t()
    assert (found - dequantized).norm() <= 0.05 * dequantized.norm()


@pytest.mark.parametrize("group", GROUPS, ids=IDS)
def test_no_bit_depends_on_the_number_of_rows_or_on_the_tiling(group: int) -> None:
    weight = quantized(group, OUTPUTS, DEPTH, DEVICE)
    linear, x = linear_of(weight), batch(max(ROWS))
    expected = sums_by_our_kernel(x, linear)
    assert expected.abs().max() > 0
    for rows in ROWS:
        assert torch.equal(sums_by_our_kernel(x[:rows], linear), expected[:rows]), rows
    for columns in (16, 32, 64):
        assert torch.equal(sums_by_our_kernel(x[:20], linear, columns), expected[:20]), columns


def test_what_follows_scales_the_rounded_sums_adds_a_bias_and_the_residual() -> None:
    """The channel's scale, then the scale of the norm before, the bias, the gate; and the sum with the residual."""
    rows, hidden = 5, OUTPUTS // 2
    draw = torch.Generator().manual_seed(4)
    bias = torch.randn(OUTPUTS, generator=draw).to(DEVICE, torch.bfloat16)
    x = torch.randn((rows, DEPTH), generator=draw).to(DEVICE, torch.bfloat16)
    linear = linear_of(quantized(0, OUTPUTS, DEPTH, DEVICE), bias)
    sums = sums_of(x, linear, rows, lambda wanted: False)
    weight = linear.quantized
    assert isinstance(weight, Fp8Weight) and weight.channels is not None
    squares = torch.rand((3, 8), generator=draw, dtype=torch.float64).to(DEVICE) * DEPTH, 3, 1e-5
    norm_scales = torch.rsqrt(squares[0].sum(0)[:rows].float() / DEPTH + 1e-5)[:, None]
    gate, up = (sums.float() * weight.channels * norm_scales + bias.float()).split(hidden, 1)
    gated = finish_product(sums.clone(), linear, squares, GATED)
    assert torch.allclose(gated.float(), torch.nn.functional.silu(gate) * up, rtol=2**-7, atol=1e-5)

    norm = Norm(torch.randn(OUTPUTS, generator=draw).to(DEVICE, torch.bfloat16), 1e-5)
    before = torch.randn((rows, OUTPUTS), generator=draw).to(DEVICE, torch.bfloat16)
    scaled, left = torch.empty_like(before), torch.zeros((8, 8), dtype=torch.float64)
    for squares_before, scales in ((None, torch.ones_like(norm_scales)), (squares, norm_scales)):
        found = before.clone()
        add_scaled(sums, linear, found, norm, scaled, left.to(DEVICE), squares_before)
        expected = (sums.float() * weight.channels * scales + bias.float() + before.float()).bfloat16()
        assert torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=2**-9)
        assert torch.equal(scaled, (found.float() * norm.weight.float()).bfloat16())


def test_rows_that_what_follows_a_product_leaves_in_fp8_have_the_bits_of_those_made_by_themselves() -> None:
    rows, hidden = 5, 384
    draw = torch.Generator().manual_seed(5)
    linear = linear_of(quantized(0, 2 * hidden, DEPTH, DEVICE))
    sums = torch.randn((rows, 2 * hidden), generator=draw).to(DEVICE, torch.bfloat16)
    squares = torch.rand((3, 8), generator=draw, dtype=torch.float64).to(DEVICE) * DEPTH, 3, 1e-5
    assert_same(
        finish_in_fp8(sums, linear, squares, GATED, "silu"), finish_product(sums.clone(), linear, squares, GATED)
    )
    into = linear_of(quantized(0, hidden, DEPTH, DEVICE))
    norm = Norm(torch.randn(hidden, generator=draw).to(DEVICE, torch.bfloat16), 1e-5)
    residual, scaled = sums[:, :hidden].clone(), torch.empty_like(sums[:, :hidden]).contiguous()
    left = add_scaled(sums[:, hidden:].contiguous(), into, residual, norm, scaled, squares[0], in_fp8=True)
    assert left is not None
    assert_same(left, scaled)


def test_a_program_of_several_rows_leaves_their_bits_and_nothing_past_the_last_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, hidden = 5, 1152
    draw = torch.Generator().manual_seed(6)
    linear = linear_of(quantized(0, 2 * hidden, DEPTH, DEVICE), torch.randn(2 * hidden).to(DEVICE, torch.bfloat16))
    given = torch.randn((rows + 1, 2 * hidden), generator=draw).to(DEVICE, torch.bfloat16)
    squares = torch.rand((3, 8), generator=draw, dtype=torch.float64).to(DEVICE) * DEPTH, 3, 1e-5
    stored, gated = (finish_product(given.clone()[:rows], linear, squares, end) for end in (STORE, GATED))
    in_fp8 = finish_in_fp8(given[:rows], linear, squares, GATED)
    monkeypatch.setattr(separate_epilogue, "_MANY_ROWS", 1)
    found = given.clone()
    finish_product(found[:rows], linear, squares, STORE)
    assert torch.equal(found[:rows], stored) and torch.equal(found[rows], given[rows])
    assert torch.equal(finish_product(given[:rows], linear, squares, GATED), gated)
    found_in_fp8 = finish_in_fp8(given[:rows], linear, squares, GATED)
    assert torch.equal(found_in_fp8.numbers[:rows].view(torch.uint8), in_fp8.numbers[:rows].view(torch.uint8))
    assert torch.equal(found_in_fp8.scales[:, :rows], in_fp8.scales[:, :rows])


def assert_same(found: Fp8Rows, x: torch.Tensor) -> None:
    expected = fp8_rows(x, len(x))
    assert torch.equal(found.numbers[: len(x)].view(torch.uint8), expected.numbers[: len(x)].view(torch.uint8))
    assert torch.equal(found.scales[:, : len(x)], expected.scales[:, : len(x)])


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS, ids=IDS)
def test_products_of_an_8b_model_have_one_order_at_every_number_of_rows_and_by_the_vendors_library(group: int) -> None:
    library = vendor_library()
    assert library is not None
    library.pinned.clear()
    for outputs, depth in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
        linear, x = linear_of(quantized(group, outputs, depth, DEVICE)), batch(1024, depth)
        expected = sums_by_our_kernel(x, linear)
        with choosing_products():
            for rows in (1, 8, 16, 33, 64, 130, 256, 1024):
                found = sums_of(x[:rows], linear, rows, lambda wanted: False)
                assert torch.equal(found, expected[:rows]), (outputs, depth, rows)
    pinned = [one for shape, one in library.pinned.items() if shape.dtype == torch.float8_e4m3fn]
    exact = [one.candidates[choice].in_blocks for one in pinned if one is not None for choice in one.exact]
    assert set(exact) == {False, True}, "the library computes the same with both forms of scales"
