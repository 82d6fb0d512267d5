"""The vendor's products without split-K, beside one float32 accumulator that adds up the depth in ascending steps."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import Linear  # noqa: E402
from runahead.runtime.kernels.triton.gemm import cublaslt as vendor  # noqa: E402
from runahead.runtime.kernels.triton.gemm.gemv import STORE  # noqa: E402
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import small_batch_product  # noqa: E402
from runahead.runtime.kernels.triton.gemm.tuning import Tiling  # noqa: E402

CHAIN = Tiling(rows=64, block=64, splits=1, stages=3, warps=4, dependent=False)


def nearly_cancelling(rows: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers of which each half of a row is nearly the other's opposite, so that a sum shows its order."""
    half = torch.randn(rows, depth // 2, device=DEVICE)
    return torch.cat([half, -half + 1e-2 * torch.randn_like(half)], 1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_the_product(dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64, device=DEVICE).to(dtype), torch.randn(24, 64, device=DEVICE).to(dtype)
    bias = torch.randn(24, device=DEVICE).to(dtype) if biased else None
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    into = torch.empty(5, 24, dtype=dtype, device=DEVICE)
    for found in (
        vendor.cublaslt_product(x, Linear(weight, bias)),
        vendor.cublaslt_product(x, Linear(weight, bias), into),
        vendor.cublaslt_product(torch.cat([x, x], 1)[:, 64:], Linear(weight, bias)),
    ):
        assert ((found.double() - expected).norm() / expected.norm()) < 1e-2
    assert torch.equal(into, vendor.cublaslt_product(x, Linear(weight, bias)))


def test_a_depth_that_the_library_does_not_take_is_torchs() -> None:
    x, weight = (
        torch.ones(3, 5, device=DEVICE, dtype=torch.bfloat16),
        torch.ones(7, 5, device=DEVICE, dtype=torch.bfloat16),
    )
    assert (vendor.cublaslt_product(x, Linear(weight, None)) == 5).all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU")
@pytest.mark.parametrize(("outputs", "depth"), [(6144, 4096), (4096, 14336), (1024, 3072)])
def test_every_kernel_that_the_library_proposes_has_the_bits_of_one_accumulator(outputs: int, depth: int) -> None:
    library = vendor.vendor_library()
    assert library is not None
    torch.manual_seed(0)
    linear = Linear(torch.randn(outputs, depth, device=DEVICE, dtype=torch.bfloat16), None)
    library.pinned.clear()  # the newest entry is looked at below
    for rows in (1, 8, 64, 65, 192, 256, 448):
        x = nearly_cancelling(rows, depth, torch.bfloat16)
        for dtype in (torch.bfloat16, torch.float32):
            expected, out = (torch.empty(rows, outputs, device=DEVICE, dtype=dtype) for _ in range(2))
            small_batch_product(x, linear, expected, STORE, CHAIN, None, rows)
            with library.choosing():
                assert library.product(x, linear, out)
            assert torch.equal(out, expected)
            pinned = next(reversed(library.pinned.values()))
            assert pinned is not None and pinned.timed
            for choice in range(len(pinned.candidates)):
                library.run(pinned, choice, x, linear, out.zero_())
                assert torch.equal(out, expected), (rows, dtype, choice)
