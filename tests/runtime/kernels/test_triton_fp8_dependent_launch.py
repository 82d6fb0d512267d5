"""Kernels before and behind the vendor's products wait before they read or write what a predecessor makes."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.kernels.quantized_weights import quantized
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import Linear, Norm  # noqa: E402
from runahead.runtime.kernels.triton.gemm import fp8_rows, separate_epilogue  # noqa: E402
from runahead.runtime.kernels.triton.gemm.epilogue import GATED  # noqa: E402
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import Residual  # noqa: E402
from tests.runtime.kernels.predecessor import check  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("fp8_matrix_units"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter runs one program after the other"),
]
ROWS, DEPTH, OUTPUTS = 3, 256, 128


def linear_of(outputs: int) -> Linear:
    weight = quantized(0, outputs, DEPTH, DEVICE)
    bias = torch.ones(outputs, dtype=torch.bfloat16)
    return Linear(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), bias, weight.for_gpu())


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(1)).bfloat16()


def residual() -> Residual:
    return Residual(drawn(ROWS, OUTPUTS), drawn(ROWS, OUTPUTS), torch.zeros((8, 8), dtype=torch.float64))


def bytes_of(numbers: torch.Tensor) -> torch.Tensor:
    """Each -1 is a NaN."""
    return numbers.view(torch.int8)


def test_rows_made_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    x, rows = drawn(ROWS, DEPTH), fp8_rows.empty_rows(ROWS, DEPTH, DEVICE)
    rows.scales.zero_()
    bytes_of(rows.numbers).zero_()
    monkeypatch.setattr(separate_epilogue, "empty_rows", lambda *sizes: rows)
    written = [bytes_of(rows.numbers), rows.scales]

    def run() -> None:
        separate_epilogue.fp8_rows(x, ROWS)

    check(monkeypatch, separate_epilogue, [x], written, run, ROWS)


def test_what_follows_the_vendors_products(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, before = drawn(ROWS, 2 * OUTPUTS), torch.ones((3, 8), dtype=torch.float64)
    linear, written = linear_of(2 * OUTPUTS), torch.zeros((16, OUTPUTS), dtype=torch.int8)
    rows = fp8_rows.Fp8Rows(written.view(torch.float8_e4m3fn), torch.zeros((1, 16)))
    monkeypatch.setattr(separate_epilogue, "empty_rows", lambda *sizes: rows)

    def run() -> None:
        separate_epilogue.finish_in_fp8(sums, linear, (before, 3, 1e-5), GATED)

    check(monkeypatch, separate_epilogue, [sums, before], [written, rows.scales], run, ROWS)


def test_the_sum_of_a_vendors_product_and_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, into, norm = drawn(ROWS, OUTPUTS), residual(), Norm(drawn(OUTPUTS), 1e-5)
    linear, written = linear_of(OUTPUTS), torch.zeros((16, OUTPUTS), dtype=torch.int8)
    rows = fp8_rows.Fp8Rows(written.view(torch.float8_e4m3fn), torch.zeros((1, 16)))
    monkeypatch.setattr(separate_epilogue, "empty_rows", lambda *sizes: rows)

    def run() -> None:
        separate_epilogue.add_scaled(sums, linear, into.values, norm, into.scaled, into.squares, in_fp8=True)

    outputs = [into.values, into.scaled, into.squares, written, rows.scales]
    check(monkeypatch, separate_epilogue, [sums, into.values], outputs, run, ROWS)
