"""Products of a few rows, with what comes before and after them, against float64. Results, buffers between
programs and everything past the rows are NaN before the kernel runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional

from tests.runtime.kernels.triton_device import TOLERANCE, relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import Linear, Norm  # noqa: E402
from runahead.runtime.kernels.triton.forward import kernel_set  # noqa: E402
from runahead.runtime.kernels.triton.forward.unfused_products import product_of_rows  # noqa: E402
from runahead.runtime.kernels.triton.gemm.epilogue import ADD, GATED, SQUARED, STORE  # noqa: E402
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import (  # noqa: E402
    Residual,
    SplitScratch,
    columns_of,
    small_batch_product,
)
from runahead.runtime.kernels.triton.gemm.tuning import Tiling, chain_of  # noqa: E402
from runahead.runtime.kernels.triton.ops.put_rows import put_rows  # noqa: E402
from tests.runtime.kernels.matrix_units import multiply_as_matrix_units  # noqa: E402

EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16)
NAN = float("nan")
DEPTH = 256


def matrix(rows: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, depth) * depth**-0.5).to(DEVICE, dtype)


def vector(width: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(width) + 0.5).to(DEVICE, dtype)


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.double()


def product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """In float64."""
    found = x.double() @ linear.weight.double().t()
    return found if linear.bias is None else found + linear.bias.double()


def gated(found: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor] = functional.silu) -> torch.Tensor:
    gate, up = found.chunk(2, -1)
    return activation(gate) * up


def gelu(gate: torch.Tensor) -> torch.Tensor:
    return functional.gelu(gate, approximate="tanh")


TILINGS = [
    Tiling(64, 64, 1, 3, 4, False, False),
    Tiling(32, 64, 4, 2, 4, True, False),
    Tiling(16, 128, 2, 1, 4, True, False),
    Tiling(32, 64, 4, 2, 4, False, False, columns=8, spread=False),
    Tiling(32, 128, 2, 1, 4, True, False, columns=8),
]
DIRECT = [Tiling(16, 128, 2, 1, 2, 0, False, direct=True), Tiling(32, 128, 2, 1, 2, 0, False, direct=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [pytest.param(False, marks=pytest.mark.large), True])
@pytest.mark.parametrize("rows", [2, 9, *(pytest.param(rows, marks=pytest.mark.large) for rows in (7, 8, 33))])
@pytest.mark.parametrize("tiling", [*TILINGS, *DIRECT])
def test_the_products_of_a_few_rows_from_residual_to_residual(
    dtype: torch.dtype, biased: bool, rows: int, tiling: Tiling
) -> None:
    """A gated feed-forward, and its first product again: sums of squares come from one tile, then from many."""
    if tiling.direct and rows > 16:
        pytest.skip("they take up to 16 rows")
    torch.manual_seed(6)
    width, columns = DEPTH, columns_of(rows)
    first, second = Norm(vector(DEPTH, dtype), EPS), Norm(vector(DEPTH, dtype), EPS)
    gate_up = Linear(matrix(2 * width, DEPTH, dtype), vector(2 * width, dtype) if biased else None)
    down = Linear(matrix(DEPTH, width, dtype), vector(DEPTH, dtype) if biased else None)
    x = torch.randn(rows, DEPTH).to(DEVICE, dtype)
    scaled = torch.full((rows, DEPTH), NAN, dtype=dtype, device=DEVICE)
    residual = Residual(x.clone(), scaled, torch.full((64, columns), NAN, dtype=torch.float64, device=DEVICE))
    residual.scaled.copy_(x.float() * first.weight.float())
    residual.squares[0, :rows] = x.float().pow(2).sum(1)
    scratch = SplitScratch(
        torch.full((1 << 18,), NAN, device=DEVICE), torch.zeros(64, dtype=torch.int32, device=DEVICE)
    )

    out = torch.full((rows, width), NAN, dtype=dtype, device=DEVICE)
    small_batch_product(residual.scaled, gate_up, out, GATED, tiling, scratch, rows, squares=(residual.squares, 1, EPS))
    expected = gated(product(normed(x, first), gate_up))
    assert relative_error(out, expected) < TOLERANCE[dtype]
    squares, other = (residual.squares, 1, EPS), torch.full_like(out, NAN)
    small_batch_product(
        residual.scaled, gate_up, other, GATED, tiling, scratch, rows, squares=squares, activation="gelu_tanh"
    )  # fmt: skip
    assert relative_error(other, gated(product(normed(x, first), gate_up), gelu)) < TOLERANCE[dtype]

    up = Linear(gate_up.weight[:width], None if gate_up.bias is None else gate_up.bias[:width])
    small_batch_product(residual.scaled, up, other.fill_(NAN), SQUARED, tiling, scratch, rows, squares=squares)
    assert relative_error(other, product(normed(x, first), up).relu().square()) < TOLERANCE[dtype]

    small_batch_product(out, down, residual.values, ADD, tiling, scratch, rows, norm=second, residual=residual)
    assert relative_error(residual.values, x.double() + product(out, down)) < TOLERANCE[dtype]
    assert relative_error(residual.scaled, residual.values.double() * second.weight.double()) < TOLERANCE[dtype]
    assert not scratch.arrived.any(), "the counters of parts are as they were"

    tiles = -(-DEPTH // tiling.rows)
    again = torch.full((rows, 2 * width), NAN, dtype=dtype, device=DEVICE)
    small_batch_product(
        residual.scaled, gate_up, again, STORE, tiling, scratch, rows, squares=(residual.squares, tiles, EPS)
    )
    assert relative_error(again, product(normed(residual.values, second), gate_up)) < TOLERANCE[dtype]


@pytest.mark.parametrize("tiling", [*TILINGS, *DIRECT])
def test_a_row_of_a_few_has_the_same_bits_whatever_its_neighbours(tiling: Tiling) -> None:
    torch.manual_seed(7)
    dtype = DTYPES[1]
    linear = Linear(matrix(96, DEPTH, dtype), None)
    x = torch.randn(16, DEPTH).to(DEVICE, dtype)
    scratch = SplitScratch(
        torch.full((1 << 16,), NAN, device=DEVICE), torch.zeros(64, dtype=torch.int32, device=DEVICE)
    )

    def of(rows: torch.Tensor) -> torch.Tensor:
        out = torch.full((rows.shape[0], 96), NAN, dtype=dtype, device=DEVICE)
        small_batch_product(rows.contiguous(), linear, out, STORE, tiling, scratch, rows.shape[0])
        return out

    together, others = of(x), x.clone()
    others[::2] = NAN
    assert torch.equal(of(others)[1::2], together[1::2])
    assert torch.equal(of(x.flip(0)).flip(0), together)


@pytest.mark.parametrize(
    ("depth", "tiling"),
    [
        (512, Tiling(16, 32, 2, 1, 2, 0, False, direct=True)),  # four blocks at a time, twice
        (192, Tiling(32, 32, 2, 1, 2, 0, False, direct=True)),  # three, and no more
        (256, Tiling(64, 64, 2, 1, 2, 0, False, direct=True)),  # one, twice
        (256, Tiling(16, 32, 4, 1, 4, 0, False, direct=True)),  # two
        (256, Tiling(8, 32, 2, 1, 2, 0, False, direct=True)),  # eight outputs a warp
        (256, Tiling(32, 32, 2, 1, 4, 0, False, direct=True)),  # two warps for each segment
        (192, Tiling(32, 64, 1, 1, 4, 0, False, direct=True)),  # four for the whole depth
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(one, marks=pytest.mark.large) for one in (torch.float16, torch.float32))]
)
def test_warps_along_the_depth_take_every_number_of_lines(depth: int, tiling: Tiling, dtype: torch.dtype) -> None:
    """What lies behind the last line is NaN, and belongs to nobody: it is neither read nor written."""
    torch.manual_seed(10)
    outputs = 72
    linear = Linear(matrix(outputs, depth, dtype), None)
    for lines in range(1, 10):
        x = torch.full((16, depth), NAN, dtype=dtype, device=DEVICE)
        x[:lines] = torch.randn(lines, depth).to(DEVICE, dtype)
        out = torch.full((16, outputs), NAN, dtype=dtype, device=DEVICE)
        small_batch_product(x, linear, out, STORE, tiling, None, lines, chained=False)
        assert relative_error(out[:lines], product(x[:lines], linear)) < TOLERANCE[dtype]
        assert bool(out[lines:].isnan().all())


def of_segments(direct: bool, segments: int, outputs: int, tiles: int, spread: bool = True) -> Tiling:
    """Return a tiling of so many segments. direct: of `warp_split_k.py`, with so many outputs of a warp, and `tiles`
    warps for each segment."""
    if direct:
        return Tiling(outputs * tiles, 32, segments, 1, segments * tiles, 0, False, direct=True)
    return Tiling(32, 32, segments, 1, 4, 0, False, spread=spread)


@pytest.mark.parametrize(
    ("sums", "tiling"),
    [
        (sums, tiling)
        for sums in ((1 << 24, 1, -(1 << 24), 3), (1 << 24, 1, 1, -(1 << 24), 5, 1 << 24, 1, -(1 << 24)))
        for tiling in (
            of_segments(True, len(sums), 8, 1),
            of_segments(True, len(sums), 16, 2),
            of_segments(True, len(sums), 32, 1),
            of_segments(False, len(sums), 32, 1),
            of_segments(False, len(sums), 32, 1, spread=False),
        )
    ],
)
def test_segments_are_added_in_ascending_order(sums: tuple[int, ...], tiling: Tiling) -> None:
    """Each segment has one product that is not 0, and the sum of the segments shows their order."""
    outputs, segment = 40, 64
    weight = torch.zeros(outputs, len(sums), segment)
    for output in range(outputs):
        for place in range(len(sums)):
            weight[output, place, (7 * output + place) % segment] = sums[(place + output) % len(sums)]
    linear = Linear(weight.flatten(1).to(DEVICE, torch.bfloat16), None)
    expected = torch.zeros(outputs)
    for place in range(len(sums)):
        expected += weight[:, place].sum(1)
    assert not torch.equal(expected, weight.double().sum((1, 2)).float()), "no sum shows its order"
    scratch = SplitScratch(torch.zeros(1 << 16, device=DEVICE), torch.zeros(64, dtype=torch.int32, device=DEVICE))
    for rows in (1, 3, 8, 16):
        factors = torch.arange(rows).exp2()
        x = factors[:, None].expand(rows, len(sums) * segment).to(DEVICE, torch.bfloat16).contiguous()
        out = torch.full((rows, outputs), NAN, device=DEVICE)
        small_batch_product(x, linear, out, STORE, tiling, scratch, rows, chained=False)
        assert torch.equal(out.cpu(), factors[:, None] * expected[None, :])


@pytest.mark.parametrize(
    "tiling",
    [
        *(Tiling(rows, block, 2, 1, warps, 0, False, direct=True)
          for rows, block, warps in ((8, 512, 2), (16, 256, 2), (16, 128, 4))),
        Tiling(32, 128, 2, 2, 4, 0, False, spread=False),
        Tiling(32, 128, 2, 2, 4, 1, False),
    ],
)  # fmt: skip
def test_the_chains_of_a_segment_are_added_in_ascending_order(tiling: Tiling) -> None:
    """Each chain has two products that are not 0, and the sum of a segment shows whether they were added first."""
    sums, outputs, chain = (1 << 24, 1, -(1 << 24), 3, 1, 1 << 24, 1, -(1 << 24)), 40, 128
    assert chain_of(len(sums) * chain, 2) == chain
    weight = torch.zeros(outputs, len(sums), chain)
    for output in range(outputs):
        for place in range(len(sums)):
            weight[output, place, (7 * output + place) % 64] = sums[(place + output) % len(sums)]
            weight[output, place, 64 + (7 * output + place) % 64] = 1
    linear = Linear(weight.flatten(1).to(DEVICE, torch.bfloat16), None)
    of_segments = torch.zeros(2, outputs)
    for place in range(len(sums)):
        of_segments[place // 4] += weight[:, place].sum(1)
    scratch = SplitScratch(torch.zeros(1 << 16, device=DEVICE), torch.zeros(64, dtype=torch.int32, device=DEVICE))
    for rows in (1, 3, 8, 16):
        factors = torch.arange(rows).exp2()
        x = factors[:, None].expand(rows, len(sums) * chain).to(DEVICE, torch.bfloat16).contiguous()
        out = torch.full((rows, outputs), NAN, device=DEVICE)
        small_batch_product(x, linear, out, STORE, tiling, scratch, rows)
        assert torch.equal(out.cpu(), factors[:, None] * (of_segments[0] + of_segments[1])[None, :])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 64])
def test_forms_of_a_chained_product_have_the_same_bits(rows: int) -> None:
    torch.manual_seed(11)
    half = torch.randn(256, 512).to(DEVICE, torch.bfloat16)
    linear = Linear(torch.cat((half, half.flip(1)), 1), None)
    x = torch.randn(64, 512).to(DEVICE, torch.bfloat16)
    x = torch.cat((x, -x.flip(1)), 1)[:rows].contiguous()  # sums that nearly cancel
    scratch = SplitScratch(torch.zeros(1 << 20, device=DEVICE), torch.zeros(64, dtype=torch.int32, device=DEVICE))
    tilings = [Tiling(32, 128, 2, 2, 4, 0, False, spread=False), Tiling(64, 128, 2, 3, 4, 1, False)]
    if rows <= 16:
        tilings += [Tiling(16, 512, 2, 1, 2, direct=True), Tiling(8, 256, 2, 1, 2, direct=True)]
    found = []
    for tiling in tilings:
        out = torch.full((rows, 256), NAN, device=DEVICE)
        small_batch_product(x, linear, out, STORE, tiling, scratch, rows)
        found.append(out)
    assert found[0].abs().max() > 0 and all(torch.equal(out, found[0]) for out in found)


@pytest.mark.parametrize("depth", [16, 33, 100])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_a_depth_that_no_block_divides_ends_in_zeros(depth: int, dtype: torch.dtype) -> None:
    """What lies behind a row of the weights, or of the batch, is the next one's."""
    torch.manual_seed(12)
    x, linear = torch.randn(9, depth).to(DEVICE, dtype), Linear(matrix(70, depth, dtype), vector(70, dtype))
    for rows in (1, 9):
        out = torch.full((rows, 70), NAN, dtype=dtype, device=DEVICE)
        product_of_rows(x[:rows], linear, out)
        assert relative_error(out, product(x[:rows], linear)) < TOLERANCE[dtype]


def test_a_squared_relu_keeps_what_is_no_number() -> None:
    x, linear = torch.ones(2, DEPTH, device=DEVICE), Linear(matrix(70, DEPTH, torch.float32), None)
    linear.weight[7, 3] = NAN
    out = torch.zeros(2, 70, device=DEVICE)
    small_batch_product(x, linear, out, SQUARED, TILINGS[0], None, 2)
    assert out.isnan().any(0).nonzero()[:, 0].tolist() == [7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_by_itself_has_the_same_bits_for_many_rows(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a product that is large enough for the vendor's library, with its bias."""
    torch.manual_seed(13)
    monkeypatch.setattr(kernel_set, "is_one_sum", lambda *sizes: True)
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    x, linear = torch.randn(70, DEPTH).to(DEVICE, dtype), Linear(matrix(70, DEPTH, dtype), vector(70, dtype))
    kernels = kernel_set.TritonKernelSet()
    many, few = (kernels.linear(x[:rows], linear.weight, linear.bias) for rows in (70, 9))
    assert torch.equal(many[:9], few)
    assert relative_error(many, product(x, linear)) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_head_leaves_float32_where_each_row_belongs(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    hidden, weight = torch.randn(rows, DEPTH).to(DEVICE, dtype), matrix(1030, DEPTH, dtype)
    out = torch.full((rows + 5, 1030), NAN, device=DEVICE)
    places = torch.randperm(rows + 5, device=DEVICE)[:rows].int()
    product_of_rows(hidden, Linear(weight, None), out, places)
    assert relative_error(out[places.long()], product(hidden, Linear(weight, None))) < TOLERANCE[torch.float32]
    assert int(out.isnan().all(1).sum()) == 5, "rows that nobody goes to stay as they are"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_put_where_they_belong_in_another_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(9)
    rows = torch.randn(4, 2500).to(DEVICE, dtype)
    out = torch.full((6, 2500), NAN, device=DEVICE)
    put_rows(rows, out, torch.tensor([3, 0, 5, 2], dtype=torch.int32, device=DEVICE))
    assert torch.equal(out[[3, 0, 5, 2]], rows.float())
    assert bool(out[[1, 4]].isnan().all())
