"""The experts' kernels of a lone row give it the bits that it has among other rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.choice import Choice  # noqa: E402
from runahead.runtime.kernels.layers import Experts, Linear, Norm, SharedExpert  # noqa: E402
from runahead.runtime.kernels.triton.moe import grouped_gemm, routing  # noqa: E402
from runahead.runtime.kernels.triton.moe import layer as layers  # noqa: E402
from runahead.runtime.kernels.triton.moe.layer import PackedExperts  # noqa: E402
from tests.runtime.kernels.matrix_units import multiply_as_matrix_units  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]
TILE = 64  # numbers of a row whose squares are summed together


class Layer:
    """A layer of experts with random weights, and rows that nearly cancel in its sums."""

    def __init__(
        self, count: int, choice: Choice, hidden: int, width: int, *, shared: int = 0, share: bool = False,
        bias: bool = False, gates: bool = True,
    ) -> None:  # fmt: skip
        self._dice = torch.Generator().manual_seed(count + hidden + width + shared)
        halves = 2 if gates else 1
        beside = None
        if shared:
            rows = halves * shared
            beside = SharedExpert(
                self._linear(rows, hidden, bias),
                self._linear(hidden, shared, bias),
                self.draw(hidden) if share else None,
            )
        weights = Experts(
            Norm(self.draw(hidden), 1e-5),
            self._linear(count, hidden, False),
            tuple(self._linear(halves * width, hidden, False) for _ in range(count)),
            tuple(self._linear(hidden, width, False) for _ in range(count)),
            choice,
            beside,
            "silu" if gates else "squared_relu",
        )
        self.packed = PackedExperts.of(weights)
        self.hidden = hidden

    def draw(self, *shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=self._dice) / math.sqrt(shape[-1])).bfloat16().to(DEVICE)

    def _linear(self, rows: int, columns: int, bias: bool) -> Linear:
        return Linear(self.draw(rows, columns), self.draw(rows) if bias else None)

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Residuals, [count, hidden], and scores."""
        residual = self.draw(count, self.hidden) * 30
        scores = torch.randn(count, self.packed.scored, generator=self._dice).to(DEVICE)
        return residual, scores

    def after(
        self, residual: torch.Tensor, scores: torch.Tensor, live: torch.Tensor, *, added: bool = True
    ) -> list[torch.Tensor]:
        """What the first row's residual, its scaled residual and its sum of squares become."""
        rows, norm = len(residual), self.packed.weights.norm
        residual, columns = residual.clone(), max(8, rows)
        squares = torch.zeros(self.hidden // 16, columns, dtype=torch.float64, device=DEVICE)
        tiles = self.hidden // TILE
        squares[:tiles, :rows] = residual.double().square().view(rows, tiles, TILE).sum(2).T
        scaled = residual * norm.weight
        arrived = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        found = self.packed.results(scaled, scores, live, arrived, squares=(squares, tiles, norm.eps))
        if not added:
            return [self.packed.made(found, live)[0]]
        left = torch.full_like(squares, math.nan)
        made = self.packed.add(found, live, residual, norm, scaled, left, dependent=False)
        return [residual[0], scaled[0], left[:made, 0].sum()]


LAYERS = {
    "softmax": Layer(11, Choice(3, True), 128, 64),
    "shares of all experts": Layer(8, Choice(4, False), 192, 128),
    "logistic, in groups": Layer(
        16, Choice(4, True, "logistic", torch.linspace(0, 0.3, 16).to(DEVICE), 4, 2, 2.5), 64, 192
    ),
    "a shared expert in pieces": Layer(6, Choice(2, True), 128, 64, shared=160),
    "a shared expert with a share": Layer(6, Choice(2, True), 256, 128, shared=128, share=True),
    "without gates, with biases": Layer(6, Choice(2, True), 128, 64, shared=128, bias=True, gates=False),
    "gates with biases": Layer(6, Choice(1, True), 64, 320, shared=320, bias=True),
}


@pytest.fixture(autouse=True)
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)


@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_lone_row_has_the_bits_that_it_has_among_others(layer: Layer, rows: int) -> None:
    residual, scores = layer.rows(rows)
    live = torch.ones(rows, dtype=torch.int32, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "route", None)  # a lone row's first product chooses its experts
        found = layer.after(residual[:1], scores[:1], live[:1])
        alone = layer.after(residual[:1], scores[:1], live[:1], added=False)
    assert all(map(torch.equal, found, layer.after(residual, scores, live)))
    assert not torch.equal(found[0], residual[0]), "as if there were no experts"
    assert all(map(torch.equal, alone, layer.after(residual, scores, live, added=False)))


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_nothing_is_added_to_a_masked_lone_row(layer: Layer) -> None:
    residual, scores = layer.rows(1)
    left, scaled, squares = layer.after(residual, scores, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    assert torch.equal(left, residual[0])
    torch.testing.assert_close(scaled, residual[0] * layer.packed.weights.norm.weight, rtol=1e-2, atol=0)  # rounded
    assert float(squares) == pytest.approx(float(residual.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "logistic"])
@pytest.mark.parametrize("scores", ["random", "far below zero"])
def test_shares_have_the_same_bits_in_either_kernel(scoring: str, scores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.randn(16, 64, generator=torch.Generator().manual_seed(4)).to(DEVICE) * 3
    given -= 40 * (scores != "random")
    choice = Choice(6, True, scoring)  # type: ignore[arg-type]
    live, arrived = torch.ones(16, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    together = routing.route(given, live, choice, arrived).routing_weights
    monkeypatch.setattr(routing, "_TOGETHER", 0)
    assert torch.equal(routing.route(given, live, choice, arrived).routing_weights, together)
    assert torch.allclose(together.view(16, 6).sum(1), torch.ones(16, device=DEVICE), atol=1e-3)


class Watched:
    """Launches of a kernel. fused: whether each was compiled with fused multiply-adds."""

    def __init__(self, kernel: Any, fused: list[bool]) -> None:
        self._kernel, self._fused = kernel, fused

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            self._fused.append(options.get("enable_fp_fusion", True))
            return self._kernel[grid](*arguments, **options)

        return launch


@pytest.mark.parametrize("rows", [1, 2, 20])
def test_no_kernel_that_scales_a_token_fuses_its_mean_of_squares_with_eps(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone token's first product finds its scale, and routing finds the others. Where the depth is no power of two, a
    fused multiply-add has other bits, which one of 48 requests to a small hybrid showed on an H200."""
    layer, fused = LAYERS["shares of all experts"], list[bool]()
    for module, name in ((routing, "_route_kernel"), (grouped_gemm, "_expert_product_kernel")):
        monkeypatch.setattr(module, name, Watched(getattr(module, name), fused))
    residual, scores = layer.rows(rows)
    layer.after(residual, scores, torch.ones(rows, dtype=torch.int32, device=DEVICE))
    assert fused == [False] * (2 if rows == 1 else 3)
