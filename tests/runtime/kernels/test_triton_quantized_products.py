"""Products with quantized matrices: each sum is one accumulator of the dequantized matrix, at every number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.runtime.kernels.matrix_units import multiply_as_matrix_units, round_to_bfloat16
from tests.runtime.kernels.quantized_weights import FORMS, quantized
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import Linear  # noqa: E402
from runahead.runtime.kernels.quantized_weight import QuantizedWeight  # noqa: E402
from runahead.runtime.kernels.triton.forward.unfused_products import one_sum  # noqa: E402
from runahead.runtime.kernels.triton.gemm import quantized_gemm  # noqa: E402
from runahead.runtime.kernels.triton.gemm.cublaslt import choosing_products  # noqa: E402
from runahead.runtime.kernels.triton.gemm.quantized_gemm import (  # noqa: E402
    QuantizedTiling,
    dequantized_in_16_bits,
    quantized_sums,
    quantized_tiling,
)

OUTPUTS, DEPTH = 80, 512
ROWS = (1, 2, 7, 16, 17, 40, 70)
IDS = [f"{kind}-{group or 'channel'}{'-zeros' if zeros else ''}" for kind, group, zeros in FORMS]


@pytest.fixture(autouse=True)
def _whatever_the_order_of_numpy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
        round_to_bfloat16(monkeypatch)
    with torch.inference_mode():
        yield


def batch(rows: int, depth: int = DEPTH) -> torch.Tensor:
    """Rows whose sums with the matrices of `quantized` cancel but for what rounding leaves: it shows their order."""
    half = torch.randn((rows, depth // 2), generator=torch.Generator().manual_seed(rows))
    return torch.cat((half, -half.flip(1)), 1).to(DEVICE, torch.bfloat16)


def by_definition(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """One accumulator of the matrix in 16 bits; with one scale for each output, the scale follows the sum."""
    matrix = weight if not weight.is_per_channel else replace(weight, scales=torch.ones_like(weight.scales))
    sums = torch.empty((len(x), weight.shape[0]), dtype=torch.float32, device=DEVICE)
    one_sum(x, Linear(matrix.dequantized(), None), sums)
    return (sums * weight.scales[0].float() if weight.is_per_channel else sums).bfloat16()


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_the_matrix_in_16_bits_has_the_numbers_of_the_reference(form: tuple[str, int, bool]) -> None:
    weight = quantized(form, OUTPUTS, DEPTH, DEVICE, torch.bfloat16)  # type: ignore[arg-type]
    found = dequantized_in_16_bits(weight)
    if weight.is_per_channel:
        found = (found.float() * weight.scales[0].float()[:, None]).bfloat16()
    assert torch.equal(found, weight.dequantized())


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_sums_are_those_of_one_accumulator_at_every_number_of_rows(
    form: tuple[str, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = quantized(form, OUTPUTS, DEPTH, DEVICE)  # type: ignore[arg-type]
    x = batch(max(ROWS))
    expected = by_definition(x, weight)
    monkeypatch.setattr(quantized_gemm, "_MANY_ROWS", 70)
    for rows in ROWS:
        assert torch.equal(quantized_sums(x[:rows], weight, one_sum), expected[:rows]), rows


@pytest.mark.parametrize("form", FORMS[:2] + FORMS[4:5], ids=IDS[:2] + IDS[4:5])
def test_no_bit_depends_on_the_tiling(form: tuple[str, int, bool]) -> None:
    weight, x = quantized(form, OUTPUTS, DEPTH, DEVICE, torch.float16), batch(20)  # type: ignore[arg-type]
    expected = by_definition(x, weight)
    for rows, columns, block in ((16, 16, 32), (32, 32, 16), (64, 16, 32)):
        found = quantized_sums(x, weight, one_sum, QuantizedTiling(rows, columns, block, 2, 4))
        assert torch.equal(found, expected), (rows, columns, block)


def test_depths_that_a_block_does_not_divide_take_smaller_blocks() -> None:
    weight = quantized(("fp8", 0, False), 48, 192, DEVICE)
    assert quantized_tiling(weight, 1).block == 64
    x = batch(3, 192)
    assert torch.equal(quantized_sums(x, weight, one_sum), by_definition(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("form", (FORMS[0], FORMS[1], FORMS[6], FORMS[7]), ids=(IDS[0], IDS[1], IDS[6], IDS[7]))
def test_products_of_an_8b_model_have_one_order_at_every_number_of_rows(form: tuple[str, int, bool]) -> None:
    for outputs, depth in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
        weight, x = quantized(form, outputs, depth, DEVICE), batch(1024, depth)  # type: ignore[arg-type]
        expected = by_definition(x, weight)
        with choosing_products():
            for rows in (1, 8, 16, 33, 64, 130, 256, 1024):
                found = quantized_sums(x[:rows], weight, one_sum)
                assert torch.equal(found, expected[:rows]), (outputs, depth, rows)
