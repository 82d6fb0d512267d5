"""FP8 products of few rows by groups of warps: the kernel's own code with emulated words, on sums that no order
changes, and compiled for compute capability 9.0. On a GPU, test_triton_fp8_products.py compares its bits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.runtime.kernels.quantized_weights import quantized
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import Linear  # noqa: E402
from runahead.runtime.kernels.quantized_weight import Fp8Weight  # noqa: E402
from runahead.runtime.kernels.triton.gemm import fp8_gemm, fp8_hopper  # noqa: E402
from runahead.runtime.kernels.triton.gemm.fp8_gemm import fp8_sums, takes_groups  # noqa: E402
from runahead.runtime.kernels.triton.gemm.fp8_rows import Fp8Rows  # noqa: E402
from runahead.runtime.kernels.triton.gpu.capability import Gpu  # noqa: E402
from tests.runtime.kernels import emulated_gluon  # noqa: E402

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="there the kernel itself runs")
PROCESSORS = 2  # each has several tiles, and stages of several turns of the ring
ROWS = (1, 9, 40)
COPIERS = "group 1"


KERNEL: Any = fp8_hopper.fp8_groups_kernel


class Emulated:
    """In the place of the kernel, with which it shares nothing but its code. waited: see `emulated_gluon.run`.
    launches: how many there were."""

    def __init__(self, waited: Callable[[bool], None] = lambda dependent: None) -> None:
        self._waited, self.launches = waited, 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, num_warps: int, maxnreg: int, enable_fp_fusion: bool, **options: Any) -> None:
            self.launches += 1
            assert num_warps == 4 and maxnreg == fp8_hopper.REGISTERS and not enable_fp_fusion
            assert options.pop("launch_pdl", False) == options["DEPENDENT"]
            emulated_gluon.run((fp8_hopper,), KERNEL, grid[0], arguments, options, waited=self._waited)

        return launch


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    kernel = Emulated()
    monkeypatch.setattr(fp8_hopper, "fp8_groups_kernel", kernel)
    return kernel


def whole_numbers(rows: int, depth: int) -> torch.Tensor:
    return torch.randint(-3, 4, (rows, depth), generator=torch.Generator().manual_seed(rows)).float()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("depth", [1024, 1280], ids=["four blocks a stage", "two"])
def test_sums_of_few_rows(rows: int, group: int, depth: int) -> None:
    outputs = 208
    weight: Any = quantized(group, outputs, depth, DEVICE).for_gpu()
    assert isinstance(weight, Fp8Weight)
    weight.numbers.copy_(whole_numbers(outputs, depth))
    weight.blocks.copy_(torch.exp2(torch.randint(-3, 3, weight.blocks.shape).float()) if group else weight.blocks)
    padded = -(-rows // 16) * 16
    x = Fp8Rows(torch.full((padded, depth), float("nan")).to(torch.float8_e4m3fn), torch.ones(depth // 128, padded))
    x.numbers[:rows] = whole_numbers(rows, depth).to(torch.float8_e4m3fn)
    x.scales.copy_(torch.exp2(torch.randint(-3, 3, x.scales.shape).float()))
    out = torch.full((padded, outputs), 7.0, dtype=torch.bfloat16)
    fp8_hopper.fp8_group_product(x, weight, out, rows, False, PROCESSORS, 3)
    scales = weight.blocks.repeat_interleave(128, 0)[:outputs, : depth // 128].repeat_interleave(128, 1)
    of_rows = x.numbers[:rows].float() * x.scales.t()[:rows].repeat_interleave(128, 1)
    assert torch.equal(out[:rows], (of_rows @ (weight.numbers.float() * scales).t()).bfloat16())
    assert (out[rows:] == 7.0).all(), "rows past the batch are written by nobody"


def test_both_groups_wait_for_the_kernels_before_and_rows_are_copied_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows are there when the copying group has waited, and what it asked for earlier lies in shared memory."""
    outputs, depth, waits = 384, 1024, list[bool]()
    x, out = whole_numbers(16, depth), torch.zeros((16, outputs), dtype=torch.bfloat16)
    rows = Fp8Rows(torch.full((16, depth), float("nan")).to(torch.float8_e4m3fn), torch.ones(depth // 128, 16))
    weight = quantized(0, outputs, depth, DEVICE).for_gpu()
    assert isinstance(weight, Fp8Weight)
    weight.numbers.copy_(whole_numbers(outputs, depth))

    def waited(dependent: bool) -> None:
        waits.append(dependent)
        if threading.current_thread().name == COPIERS:
            rows.numbers.copy_(x)

    monkeypatch.setattr(fp8_hopper, "fp8_groups_kernel", Emulated(waited))
    fp8_hopper.fp8_group_product(rows, weight, out, 16, True, PROCESSORS, 2)
    assert waits == [True] * (PROCESSORS * 2)
    assert torch.equal(out, (x @ weight.numbers.float().t()).bfloat16())


@pytest.mark.parametrize(("capability", "rows", "launches"), [((9, 0), 16, 1), ((9, 0), 17, 0), ((10, 0), 16, 0)])
def test_products_of_few_rows_are_given_to_it(
    monkeypatch: pytest.MonkeyPatch, emulated: Emulated, capability: tuple[int, int], rows: int, launches: int
) -> None:
    monkeypatch.setattr(fp8_gemm, "current_gpu", lambda: Gpu("a GPU", capability, 1 << 17, PROCESSORS))
    outputs, depth = 128, 1024
    weight = quantized(0, outputs, depth, DEVICE).for_gpu()
    assert isinstance(weight, Fp8Weight)
    weight.numbers.copy_(whole_numbers(outputs, depth).clamp(-1, 1))
    padded = -(-rows // 16) * 16
    x = Fp8Rows(torch.zeros((padded, depth), dtype=torch.float8_e4m3fn), torch.ones(depth // 128, padded))
    x.numbers[:rows] = whole_numbers(rows, depth).clamp(-1, 1).to(torch.float8_e4m3fn)
    linear = Linear(torch.empty((outputs, depth), device="meta"), None, weight)
    found = fp8_sums(x, linear, rows, lambda wanted: False)
    assert emulated.launches == launches
    expected = (x.numbers[:rows].float() @ weight.numbers.float().t()).bfloat16()
    assert torch.equal(found, expected), "small whole numbers have no order"


def test_a_deep_matrix_is_left_to_the_vendors_library_earlier() -> None:
    wide, deep = (quantized(0, outputs, depth, DEVICE).for_gpu() for outputs, depth in ((256, 128), (128, 256)))
    assert isinstance(wide, Fp8Weight) and isinstance(deep, Fp8Weight)
    assert [rows for rows in (1, 16, 17, 64, 65) if takes_groups(wide, rows)] == [1, 16, 17, 64]
    assert [rows for rows in (1, 16, 17, 64, 65) if takes_groups(deep, rows)] == [1, 16]


def test_it_compiles_for_the_matrix_units_of_hopper() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TRITON_CACHE_DIR")
    }
    command = [sys.executable, "-m", "tests.runtime.kernels.compiled_fp8_groups"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert not done.returncode, done.stderr
    assert done.stdout.splitlines() == [
        f"{rows} wgmma.mma_async.sync.aligned.m64n{rows}k32.f32.e4m3.e4m3 True True True" for rows in (8, 64, 8, 64)
    ]
