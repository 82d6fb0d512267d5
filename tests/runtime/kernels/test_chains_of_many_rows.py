"""Products of many rows with what follows them: the kernel's own code with emulated words, against the definition's
sums; on a GPU, against the kernel for few rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import Linear, Norm  # noqa: E402
from runahead.runtime.kernels.triton.forward.unfused_products import has_end_inside  # noqa: E402
from runahead.runtime.kernels.triton.gemm import chains_hopper, copies_hopper, end_hopper, tuning  # noqa: E402
from runahead.runtime.kernels.triton.gemm.epilogue import ADD, EPILOGUES, GATED, SQUARED, STORE  # noqa: E402
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import (  # noqa: E402
    Residual,
    columns_of,
    small_batch_product,
)
from runahead.runtime.kernels.triton.gpu.capability import Gpu  # noqa: E402
from runahead.runtime.kernels.triton.ops import activation, norms  # noqa: E402
from tests.runtime.kernels import emulated_gluon  # noqa: E402

KERNEL: Any = chains_hopper.chains_kernel
MODULES = (activation, norms, end_hopper, copies_hopper, chains_hopper)
PROGRAMS = 3
EPS, TILES = 1e-5, 19  # of the norm before
COPIER = "group 2"
emulation = pytest.mark.skipif(DEVICE.type == "cuda", reason="there the kernel itself runs")


class Emulated:
    """In the place of the kernel, with which it shares nothing but its code. waited: see `emulated_gluon.run`."""

    def __init__(self, waited: Callable[[bool], None] = lambda dependent: None) -> None:
        self._waited = waited

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, num_warps: int, enable_fp_fusion: bool, **options: Any) -> None:
            assert num_warps == 4 and grid[0] <= PROGRAMS and not enable_fp_fusion
            assert options.pop("launch_pdl", False) == options["DEPENDENT"]
            emulated_gluon.run(MODULES, KERNEL, grid[0], arguments, options, waited=self._waited)

        return launch


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains_hopper, "chains_kernel", Emulated())
    properties = SimpleNamespace(multi_processor_count=PROGRAMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def summed(x: torch.Tensor, weight: torch.Tensor, splits: int, chain: int) -> torch.Tensor:
    """The rounded sums as the definition orders them, with the emulator's order inside a chain: [T, outputs]."""
    size, total = x.shape[1] // splits, torch.zeros(len(x), len(weight))
    for begin in range(0, x.shape[1], size):
        segment = torch.zeros_like(total)
        for first in range(begin, begin + size, chain or size):
            last = first + (chain or size)
            steps = [slice(at, at + copies_hopper.STEP) for at in range(first, last, copies_hopper.STEP)]
            parts = [x[:, step].float() @ weight[:, step].float().T for step in steps]
            segment += sum(parts[1:], parts[0])
        total += segment
    return total.bfloat16().float()


def ended(
    sums: torch.Tensor, linear: Linear, epilogue: int, scale: torch.Tensor | None, old: torch.Tensor
) -> torch.Tensor:
    """What follows the sums, as docs/exactness.md has it: bfloat16 [T, outputs]. scale: float32 [T, 1]."""
    value = sums if scale is None else sums * scale
    if linear.bias is not None:
        value = value + linear.bias.float()
    if epilogue == GATED:
        gate, up = value.chunk(2, 1)
        value = gate / (1.0 + torch.exp(-gate)) * up
    elif epilogue == SQUARED:
        value = torch.where(value < 0.0, 0.0, value) ** 2
    elif epilogue == ADD:
        value = value + old.float()
    return value.bfloat16()


@emulation
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("rows", "outputs", "depth", "splits", "chain", "tile"),
    [
        (200, 200, 256, 1, 0, (256, False)),  # several tiles for a program, and rows and outputs that end within one
        (65, 328, 192, 1, 0, (192, False)),
        (130, 96, 576, 1, 0, (96, False)),
        (1200, 64, 128, 1, 0, (64, False)),  # more strips of rows than run at a time
        (200, 200, 512, 2, 128, (128, False)),
        (65, 192, 384, 2, 64, (64, False)),
        (65, 72, 512, 2, 64, (64, True)),
        (130, 192, 1024, 4, 128, (64, True)),
    ],
)
@pytest.mark.parametrize(
    ("epilogue", "has_bias", "is_scaled"),
    [(STORE, False, False), (STORE, True, True), (GATED, True, True), (SQUARED, False, True), (ADD, True, False)],
    ids=["store", "scaled", "gated", "squared", "added"],
)
def test_sums_are_added_in_order_and_what_follows_is_rounded_once(
    monkeypatch: pytest.MonkeyPatch, rows: int, outputs: int, depth: int, splits: int, chain: int,
    tile: tuple[int, bool], epilogue: int, has_bias: bool, is_scaled: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(chains_hopper, "tile_of", lambda *_: tile)
    monkeypatch.setattr(chains_hopper, "segments", lambda *_: splits)
    monkeypatch.setattr(chains_hopper, "chain_of", lambda *_: chain)
    torch.manual_seed(3)
    lines = outputs * (2 if epilogue == GATED else 1)
    x, weight = torch.randn(rows, depth).bfloat16(), torch.randn(lines, depth).bfloat16()
    linear = Linear(weight, torch.randn(lines).bfloat16() if has_bias else None)
    squares = torch.rand(TILES, rows + 5, dtype=torch.float64) * depth / TILES
    scale = torch.rsqrt(squares[:, :rows].sum(0).float() / depth + EPS)[:, None]
    old, gamma = torch.randn(rows, outputs).bfloat16(), torch.randn(outputs).bfloat16()
    residual = Residual(old.clone(), torch.empty_like(old), torch.full((64, rows + 5), -1.0, dtype=torch.float64))
    out = residual.values if epilogue == ADD else torch.full((rows, outputs), float("nan"), dtype=torch.bfloat16)
    more: dict[str, Any] = {"norm": Norm(gamma, EPS), "residual": residual} if epilogue == ADD else {}
    before = (squares, TILES, EPS) if is_scaled else None
    tiles = chains_hopper.many_rows_product(x, linear, out, epilogue, squares=before, **more)
    expected = ended(summed(x, weight, splits, chain), linear, epilogue, scale if is_scaled else None, old)
    assert torch.equal(out, expected)
    if epilogue == ADD:
        assert torch.equal(residual.scaled, (expected.float() * gamma.float()).bfloat16())
        found = residual.squares[:tiles, :rows].sum(0)
        assert torch.allclose(found, (expected.double() ** 2).sum(1), rtol=1e-7, atol=0.0)
        assert (residual.squares[tiles:] == -1.0).all() and (residual.squares[:, rows:] == -1.0).all()


@emulation
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("splits", "tile"), [(1, (96, False)), (2, (64, True))])
def test_all_groups_wait_for_the_kernels_before_and_only_weights_are_copied_earlier(
    monkeypatch: pytest.MonkeyPatch, splits: int, tile: tuple[int, bool]
) -> None:
    monkeypatch.setattr(chains_hopper, "tile_of", lambda *_: tile)
    monkeypatch.setattr(chains_hopper, "segments", lambda *_: splits)
    torch.manual_seed(4)
    rows, outputs, depth, waits = 70, 192, 512, list[bool]()
    x, weight = (torch.randint(-3, 4, (n, depth)).bfloat16() for n in (rows, outputs))
    made, out = torch.full_like(x, float("nan")), torch.zeros(rows, outputs, dtype=torch.bfloat16)

    def waited(dependent: bool) -> None:
        waits.append(dependent)
        assert not out.any(), "nothing is written before all have waited"
        if threading.current_thread().name == COPIER:
            made.copy_(x)

    monkeypatch.setattr(chains_hopper, "chains_kernel", Emulated(waited))
    properties = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    chains_hopper.many_rows_product(made, Linear(weight, None), out, STORE, dependent=True)
    assert waits == [True] * 3
    assert torch.equal(out, (x.float() @ weight.float().t()).bfloat16())


def test_tiles_of_segments_are_the_smallest_that_run_at_a_time() -> None:
    assert chains_hopper.tile_of(256, 1024, 4, 132) == (64, True)
    assert chains_hopper.tile_of(256, 4096, 2, 132) == (64, False)
    assert chains_hopper.tile_of(256, 6144, 2, 132) == (128, False)


def a_linear(outputs: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> Linear:
    return Linear(torch.empty(outputs, depth, dtype=dtype, device="meta"), None)


def test_only_compute_capability_9_0_and_bfloat16_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, has in (((9, 0), True), ((10, 0), False), ((8, 9), False)):
        monkeypatch.setattr(tuning, "current_gpu", lambda capability=capability: Gpu("a GPU", capability, 1 << 17, 132))
        assert has_end_inside(a_linear(1024, 2048), 100) == has_end_inside(a_linear(4096, 4096), 1024) == has
    monkeypatch.setattr(tuning, "current_gpu", lambda: Gpu("a GPU", (9, 0), 1 << 17, 132))
    assert not has_end_inside(a_linear(1024, 2048, torch.float16), 100)
    assert not has_end_inside(a_linear(1032, 2048), 100), "rows of gated results begin at multiples of 16 bytes"
    assert not has_end_inside(a_linear(1024, 2080), 100)


def test_one_sum_is_left_to_the_library_where_tiles_do_not_fill_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "current_gpu", lambda: Gpu("a GPU", (9, 0), 1 << 17, 132))
    rows = (128, 224, 512, 700, 1024, 2048)
    assert [has_end_inside(a_linear(6144, 4096), n) for n in rows] == [False, False, True, False, True, True]
    assert [has_end_inside(a_linear(4096, 4096), n) for n in rows] == [False, False, False, False, True, True]
    assert not any(has_end_inside(a_linear(4096, 14336), n) for n in rows)
    assert [tuning.one_sum_tile(n, 6144, 132)[0] for n in (512, 1024, 2048, 8192)] == [192, 192, 256, 256]


@pytest.mark.gpu
@pytest.mark.skipif(not tuning.has_many_rows_kernel(100, 1024, 2048), reason="needs compute capability 9.0")
@pytest.mark.parametrize("epilogue", [STORE, ADD, GATED], ids=["store", "added", "gated"])
@pytest.mark.parametrize(
    ("outputs", "depth"), [(4096, 1024), (1024, 2048), (1024, 3072), (2048, 1152), (6144, 4096), (4096, 4096)]
)
def test_many_rows_have_the_bits_of_few(outputs: int, depth: int, epilogue: int) -> None:
    torch.manual_seed(0)
    lines = outputs * (2 if epilogue == GATED else 1)
    half, near = (torch.randn(n, depth // 2, device=DEVICE) for n in (lines, 1100))
    linear = Linear(torch.cat([half, half.flip(1)], 1).bfloat16(), torch.randn(lines, device=DEVICE).bfloat16())
    x = torch.cat([near, -near.flip(1) + 1e-2 * torch.randn_like(near)], 1).bfloat16()  # sums nearly cancel
    old, norm = torch.randn(len(x), outputs, device=DEVICE).bfloat16(), Norm(linear.weight[:outputs, 0].clone(), EPS)
    squares = (torch.rand(TILES, columns_of(len(x)), device=DEVICE) * 2**20).double()  # their sums have no order

    def found(rows: slice, few: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The values, what the next product reads of them, and the sums of squares, where ADD makes these."""
        count = len(x[rows])
        left = torch.zeros(outputs // 8, columns_of(count), dtype=torch.float64, device=DEVICE)
        residual = Residual(old[rows].clone(), torch.zeros_like(old[rows]), left)
        more: dict[str, Any] = {"norm": norm, "residual": residual} if epilogue == ADD else {}
        more["squares"] = (squares[:, rows].contiguous(), TILES, EPS) if epilogue != ADD else None
        if few:
            tiling = tuning.rows_tiling(lines, depth, 64, EPILOGUES[epilogue])
            tiling = replace(tiling, spread=False, dependent=False)
            small_batch_product(x[rows], linear, residual.values, epilogue, tiling, None, count, **more)
        else:
            chains_hopper.many_rows_product(x[rows], linear, residual.values, epilogue, **more)
        return residual.values, residual.scaled, left.sum(0)[:count]

    parts = [found(slice(first, first + 50), True) for first in range(0, 1100, 50)]
    expected = [torch.cat(of_all) for of_all in zip(*parts, strict=True)]
    for rows in (65, 128, 130, 256, 500, 1100):
        for one, other in zip(found(slice(0, rows), False), expected, strict=True):
            assert torch.equal(one, other[:rows]), rows
