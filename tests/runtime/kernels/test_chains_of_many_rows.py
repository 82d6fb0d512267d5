"""Products of many rows in segments and chains: the kernel's own code with emulated words, against the definition's
sums; on a GPU, against the kernel for few rows.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import Linear  # noqa: E402
from runahead.runtime.kernels.triton.forward.unfused_products import product_of_rows, sums_of  # noqa: E402
from runahead.runtime.kernels.triton.gemm import chains_hopper, tuning  # noqa: E402
from runahead.runtime.kernels.triton.gpu.capability import Gpu  # noqa: E402
from tests.runtime.kernels import emulated_gluon  # noqa: E402

KERNEL: Any = chains_hopper.chains_kernel
PROGRAMS = 3
BY_ROWS, NARROW, BY_SEGMENTS = (128, False), (64, False), (64, True)  # tiles


class Emulated:
    """In the place of the kernel, with which it shares nothing but its code. launches: how many there were."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, num_warps: int, **options: Any) -> None:
            self.launches += 1
            assert num_warps == 4 and grid[0] <= PROGRAMS
            emulated_gluon.run((chains_hopper,), KERNEL, grid[0], arguments, options)

        return launch


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    kernel = Emulated()
    monkeypatch.setattr(chains_hopper, "chains_kernel", kernel)
    properties = SimpleNamespace(multi_processor_count=PROGRAMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return kernel


def summed(x: torch.Tensor, weight: torch.Tensor, splits: int, chain: int) -> torch.Tensor:
    """The sums as the definition orders them, with the emulator's order inside a chain."""
    size, total = x.shape[1] // splits, torch.zeros(len(x), len(weight))
    for begin in range(0, x.shape[1], size):
        segment = torch.zeros_like(total)
        for first in range(begin, begin + size, chain):
            steps = [slice(at, at + chains_hopper.STEP) for at in range(first, first + chain, chains_hopper.STEP)]
            parts = [x[:, step].float() @ weight[:, step].float().T for step in steps]
            segment += sum(parts[1:], parts[0])
        total += segment
    return total.bfloat16()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there the kernel itself runs")
@pytest.mark.parametrize(
    ("rows", "width", "depth", "splits", "chain", "tile"),
    [
        (200, 328, 512, 2, 128, BY_ROWS),  # several tiles for a program, and rows and outputs that end within one
        (65, 192, 384, 2, 64, NARROW),
        (65, 72, 512, 2, 64, BY_SEGMENTS),
        (130, 192, 1024, 4, 128, BY_SEGMENTS),
        (1200, 128, 512, 2, 128, BY_ROWS),  # more strips of rows than run at a time
    ],
)
def test_segments_and_chains_are_added_in_order(
    monkeypatch: pytest.MonkeyPatch,
    emulated: Emulated,
    rows: int,
    width: int,
    depth: int,
    splits: int,
    chain: int,
    tile: tuple[int, bool],
) -> None:
    monkeypatch.setattr(chains_hopper, "tile_of", lambda *_: tile)
    torch.manual_seed(3)
    x, weight = torch.randn(rows, depth).bfloat16(), torch.randn(width, depth).bfloat16()
    out = torch.full((rows, width), float("nan"), dtype=torch.bfloat16)
    chains_hopper.chains_product(x, weight, out, splits, chain)
    assert torch.equal(out, summed(x, weight, splits, chain)) and emulated.launches == 1


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there the kernel itself runs")
@pytest.mark.parametrize(
    ("capability", "dtype", "launches"),
    [((9, 0), torch.bfloat16, 1), ((9, 0), torch.float16, 0), ((10, 0), torch.bfloat16, 0)],
)
def test_products_in_segments_are_given_to_it(
    monkeypatch: pytest.MonkeyPatch,
    emulated: Emulated,
    capability: tuple[int, int],
    dtype: torch.dtype,
    launches: int,
) -> None:
    monkeypatch.setattr(tuning, "current_gpu", lambda: Gpu("a GPU", capability, 1 << 17))
    torch.manual_seed(4)
    rows, width, depth = 65, 64, 1024
    splits = tuning.segments(width, depth)
    x, weight = torch.randint(-1, 2, (rows, depth)).to(dtype), torch.randint(-1, 2, (width, depth)).to(dtype)
    found = sums_of(x, Linear(weight, None), rows, lambda wanted: False)
    assert splits > 1 and emulated.launches == launches
    assert torch.equal(found, (x.float() @ weight.float().t()).to(dtype)), "small whole numbers have no order"


def test_tiles_are_the_smallest_that_run_at_a_time() -> None:
    assert chains_hopper.tile_of(256, 1024, 132) == BY_SEGMENTS
    assert chains_hopper.tile_of(256, 4096, 132) == NARROW
    assert chains_hopper.tile_of(256, 6144, 132) == BY_ROWS


def test_only_compute_capability_9_0_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, has in (((9, 0), True), ((10, 0), False), ((8, 9), False)):
        monkeypatch.setattr(tuning, "current_gpu", lambda capability=capability: Gpu("a GPU", capability, 1 << 17))
        assert tuning.has_chains_of_many_rows(1024, 2048) == has
    monkeypatch.setattr(tuning, "current_gpu", lambda: Gpu("a GPU", (9, 0), 1 << 17))
    assert not tuning.has_chains_of_many_rows(4096, 4096), "one sum is the library's"
    assert not tuning.has_chains_of_many_rows(1028, 2048), "rows of results begin at multiples of 16 bytes"


@pytest.mark.gpu
@pytest.mark.skipif(not tuning.has_chains_of_many_rows(1024, 2048), reason="needs compute capability 9.0")
@pytest.mark.parametrize(("outputs", "depth"), [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (2048, 1152)])
def test_many_rows_have_the_bits_of_few(outputs: int, depth: int) -> None:
    torch.manual_seed(0)
    half, near = (torch.randn(n, depth // 2, device=DEVICE) for n in (outputs, 1100))
    linear = Linear(torch.cat([half, half.flip(1)], 1).bfloat16(), None)
    x = torch.cat([near, -near.flip(1) + 1e-2 * torch.randn_like(near)], 1).bfloat16()  # sums nearly cancel
    expected = torch.empty(len(x), outputs, device=DEVICE, dtype=torch.bfloat16)
    product_of_rows(x, linear, expected)
    for rows in (65, 128, 130, 256, 500, 1100):
        assert torch.equal(sums_of(x[:rows], linear, rows, lambda wanted: False), expected[:rows]), rows
