"""Experts in FP8 by Triton's kernels: the sums of dense products in FP8, for any number of rows and any tiling."""

from __future__ import annotations

import math

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import Experts, Linear, SharedExpert  # noqa: E402
from runahead.runtime.kernels.quantized_weight import ExpertFp8, QuantizedWeight  # noqa: E402
from runahead.runtime.kernels.triton.gemm.fp8_gemm import fp8_product  # noqa: E402
from runahead.runtime.kernels.triton.gemm.separate_epilogue import fp8_rows  # noqa: E402
from runahead.runtime.kernels.triton.moe import grouped_gemm  # noqa: E402
from runahead.runtime.kernels.triton.moe.layer import PackedExperts  # noqa: E402
from runahead.runtime.kernels.triton.moe.routing import Routing, route  # noqa: E402
from runahead.runtime.kernels.triton.moe.tuning import LAST, ExpertTiling  # noqa: E402
from tests.runtime.kernels.fp8_experts import dequantized, fp8_experts  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory", "fp8_matrix_units"),
]
HIDDEN, WIDTH = 256, 128
FORMS = {"channels": (0, 0), "blocks": (128, 128), "halves of blocks": (64, 128), "tensors": (WIDTH, 0)}


def shared_expert() -> SharedExpert:
    def linear(rows: int, columns: int) -> Linear:
        drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
        return Linear((drawn / math.sqrt(columns)).to(DEVICE, torch.bfloat16), None)

    return SharedExpert(linear(2 * 192, HIDDEN), linear(HIDDEN, 192))


def made(weights: Experts, rows: int, among: int = 0) -> torch.Tensor:
    """What experts make of the first of random rows, every fourth one masked, [rows, hidden]. among: of how many rows
    there are, if not of `rows`."""
    packed, draw, every = PackedExperts.of(weights), torch.Generator().manual_seed(9), max(rows, among)
    x = torch.randn(700, len(weights.norm.weight), generator=draw)[:every].to(DEVICE, torch.bfloat16)
    scores = torch.randn(700, packed.scored, generator=draw)[:every].to(DEVICE)
    live = (torch.arange(every) % 4 != 3).int().to(DEVICE)
    squares = torch.zeros(1, max(8, every), dtype=torch.float64, device=DEVICE)
    squares[0, :every] = x.double().square().sum(1)
    arrived = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    results = packed.results(x, scores, live, arrived, squares=(squares, 1, 1e-6))
    return packed.made(results, live)[:rows]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_row_has_the_bits_that_it_has_alone_close_to_those_of_the_dequantized_matrices(form: tuple[int, int]) -> None:
    weights = fp8_experts(HIDDEN, WIDTH, form, DEVICE)
    alone = made(weights, 1)
    assert alone.isfinite().all() and alone.any()
    for among in (2, 20, 70):
        assert torch.equal(made(weights, 1, among), alone), among
    found, expected = made(weights, 20).float(), made(dequantized(weights), 20).float()
    assert (found - expected).norm() < 0.06 * expected.norm()


@pytest.mark.parametrize("rows", [1, 5])
def test_a_shared_expert_in_16_bits_is_added_to_experts_in_fp8(rows: int) -> None:
    alone, beside = (fp8_experts(HIDDEN, WIDTH, FORMS["blocks"], DEVICE, shared=s) for s in (None, shared_expert()))
    plain = dequantized(beside)
    expected = made(plain, rows).float() - made(dequantized(alone), rows).float()
    found = made(beside, rows).float() - made(alone, rows).float()
    assert expected.norm() > 0 and (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("tile", [32, 128])
def test_no_bit_hangs_on_the_tiling(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = fp8_experts(HIDDEN, WIDTH, FORMS["blocks"], DEVICE)
    found = made(weights, 5)
    monkeypatch.setattr(grouped_gemm, "expert_tiling", lambda *asked: ExpertTiling(tile, 128, 3, 4))
    assert torch.equal(made(weights, 5), found)


def routed_to(weights: Experts, rows: int) -> Routing:
    scores = torch.randn(rows, weights.count, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    live, arrived = torch.ones(rows, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    return route(scores, live, weights.choice, arrived)


def test_an_expert_s_sums_are_those_of_a_dense_product_in_fp8() -> None:
    """With one expert a row has a weight of 1, and both round the same accumulator."""
    rows, depth = 20, 384
    weights = fp8_experts(HIDDEN, depth, FORMS["blocks"], DEVICE, count=3, chosen=1)
    packed, routed = PackedExperts.of(weights), routed_to(weights, rows)
    x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(4)).to(DEVICE, torch.bfloat16)
    out = torch.full((rows, HIDDEN), torch.nan, dtype=torch.float32, device=DEVICE)
    grouped_gemm.expert_product(x, packed.down, routed, 1, out, LAST)
    seen = 0
    for expert, linear in enumerate(weights.down):
        assert isinstance(linear.quantized, ExpertFp8)
        of_rows = linear.quantized.scales.repeat_interleave(128, 0).t().contiguous()
        dense = QuantizedWeight("fp8", linear.quantized.numbers.view(torch.uint8), of_rows, None, 128, torch.bfloat16)
        expected = torch.empty((32, HIDDEN), dtype=torch.bfloat16, device=DEVICE)
        fp8_product(fp8_rows(x, rows), Linear(linear.weight, None, dense.for_gpu()), expected, rows)
        mine = routed.items[(routed.items[:, 0] == expert) & (routed.items[:, 2] > 0)]
        entries = routed.entries[expert, : int(mine[:, 2].sum())].long()
        assert torch.equal(out[entries].bfloat16(), expected[entries])
        seen += len(entries)
    assert seen == rows


def test_matrices_are_packed_without_copies() -> None:
    weights = fp8_experts(HIDDEN, WIDTH, FORMS["blocks"], DEVICE)
    packed, first = PackedExperts.of(weights), weights.down[0].quantized
    assert isinstance(packed.down, ExpertFp8) and isinstance(first, ExpertFp8)
    assert packed.down.shape == (5, HIDDEN, WIDTH)
    assert packed.down.numbers.data_ptr() == first.numbers.data_ptr()
    assert packed.down.scales.data_ptr() == first.scales.data_ptr()
