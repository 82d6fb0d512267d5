"""The vendor's products without split-K, beside one float32 accumulator that adds up the depth in ascending steps."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import Linear  # noqa: E402
from runahead.runtime.kernels.triton.forward.unfused_products import one_sum  # noqa: E402
from runahead.runtime.kernels.triton.gemm import cublaslt as vendor  # noqa: E402
from runahead.runtime.kernels.triton.gemm.epilogue import STORE  # noqa: E402
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import small_batch_product  # noqa: E402
from runahead.runtime.kernels.triton.gemm.tuning import Tiling  # noqa: E402

CHAIN = Tiling(rows=64, block=64, splits=1, stages=3, warps=4, dependent=False)


def nearly_cancelling(rows: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers of which each half of a row is nearly the other's opposite, so that a sum shows its order."""
    half = torch.randn(rows, depth // 2, device=DEVICE)
    return torch.cat([half, -half + 1e-2 * torch.randn_like(half)], 1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("depth", [64, 65])
def test_a_product_is_the_product(dtype: torch.dtype, depth: int) -> None:
    """Whatever the library takes: neither float32 nor odd depths."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, depth, device=DEVICE).to(dtype), torch.randn(24, depth, device=DEVICE).to(dtype)
    expected, found = x.double() @ weight.double().t(), torch.empty(5, 24, dtype=dtype, device=DEVICE)
    with vendor.choosing_products():
        vendor.exact_product(x, weight, found, one_sum)
    assert ((found.double() - expected).norm() / expected.norm()) < 1e-2


def test_float32_is_never_the_vendor_s(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(vendor, "vendor_library", lambda: asked.append("the library"))
    for dtype, count in ((torch.float32, 0), (torch.float16, 1), (torch.bfloat16, 2)):
        x = torch.ones(3, 64, device=DEVICE, dtype=dtype)
        vendor.exact_product(x, x, torch.empty(3, 3, device=DEVICE, dtype=dtype), one_sum)
        assert len(asked) == count


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU")
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "depth"), [(6144, 4096), (4096, 14336), (1024, 3072)])
def test_every_kernel_that_the_library_proposes_has_the_bits_of_one_accumulator(
    outputs: int, depth: int, of: torch.dtype
) -> None:
    library = vendor.vendor_library()
    assert library is not None
    torch.manual_seed(0)
    linear = Linear(torch.randn(outputs, depth, device=DEVICE, dtype=of), None)
    library.pinned.clear()  # the newest entry is looked at below
    for rows in (1, 8, 64, 65, 192, 256, 448):
        x = nearly_cancelling(rows, depth, of)
        for dtype in (of, torch.float32):
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
