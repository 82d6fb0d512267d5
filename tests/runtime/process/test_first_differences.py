"""What tests on a GPU ask of first differences (`tests/gpu/test_first_differences_on_cuda.py`), asked of the CPU's
device: with products that round as bfloat16 does, and in another order where there are more rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch

from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.kernels.reference.linear import Product, Products
from runahead.runtime.models.cpu_check.cpu_kernels import KernelTrial
from runahead.runtime.process import cpu
from tests.gpu.first_differences import (
    MOST,
    Asked,
    Pair,
    among_neighbours,
    check,
    compared,
    computed_otherwise,
    requests,
)
from tests.parity.upcycled import BUNDLED
from tests.runtime.kernels.bfloat16_products import Bfloat16Products
from tests.runtime.kernels.broken_products import ProductTogether, RowsTogether
from tests.runtime.kernels.near_ties import Bounds, Kind, Reference

pytestmark = pytest.mark.timeout(300)

HYBRID: Final = BUNDLED / "hybrid"


def with_products(patch: pytest.MonkeyPatch, products: Products) -> None:
    """An engine on the CPU has these, and does not try whether they keep rows apart."""

    def chosen(*_: Any, **__: Any) -> tuple[ReferenceKernels, KernelTrial]:
        return ReferenceKernels(products), KernelTrial("made up", {}, 0, 0, 0, 1, 0.0)

    patch.setattr(cpu, "tried_kernels", chosen)


def neighbours(asked: list[Asked]) -> Iterator[Pair]:
    return among_neighbours(BUNDLED, "cpu", asked, (2,))


def test_what_neighbours_change_by_rounding_is_a_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    with_products(monkeypatch, Bfloat16Products())
    (found,) = check(neighbours(requests(BUNDLED, 8, (40, 100), (16, 30))), BUNDLED)
    assert found.requests == 8 and found.found, "rounding has changed nothing"


def test_what_is_computed_otherwise_is_compared_in_all_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are found, those generated too, and rows are evicted: else it would fail."""
    with_products(monkeypatch, Bfloat16Products())
    asked = requests(BUNDLED, 8, (20, 60), (20, 40))
    found = check(computed_otherwise(BUNDLED, "cpu", asked, has_states=False), BUNDLED)
    assert [each.requests for each in found] == [8] * 5


def test_where_rows_keep_their_bits_nothing_differs_and_routers_are_looked_at_all_the_same() -> None:
    asked = requests(HYBRID, 5, (3, 40), (8, 12))
    (found,) = check(among_neighbours(HYBRID, "cpu", asked, (2,)), HYBRID)
    assert (found.found, found.tokens) == ((), sum(one.tokens for one in asked))
    assert len(found.unchanged) == 4 and 0 < max(found.unchanged) < 1


class AllButTheLast(RowsTogether):
    """Products that leave out the last sixteenth of the depth where there are more than two rows."""

    def bind(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:  # type: ignore[override]
        return _ProductOfAllButTheLast(weight.float(), None if bias is None else bias.float())


class _ProductOfAllButTheLast(ProductTogether):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        depth = x.shape[1] if x.shape[0] <= 2 else x.shape[1] - x.shape[1] // 16
        return torch.nn.functional.linear(x[:, :depth], self.weight[:, :depth], self.bias)


def test_what_a_wrong_product_changes_is_no_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    with_products(monkeypatch, AllButTheLast())
    with pytest.raises(AssertionError, match="not explained"):
        check(neighbours(requests(BUNDLED, 6, (3, 60), (8, 16))), BUNDLED)


def test_what_is_counted_of_completions_that_were_made_up() -> None:
    """The tokens up to the first difference, and of each difference its kind."""
    asked = requests(BUNDLED, 4, (5, 9), (4, 4))
    reference = Reference(BUNDLED)
    best = [int(reference.after(one.prompt)[0].argmax()) for one in asked]
    worst = [int(reference.after(one.prompt)[0].argmin()) for one in asked]
    same, other = [[token, 7, 8, 9] for token in best], [[token, 7, 8, 9] for token in best]
    other[0] = [worst[0], 7, 8, 9]
    found = compared(Pair("made up", asked, same, other), reference, Bounds(2**-4, 0.0, 0.0))
    assert (found.requests, found.tokens) == (4, 1 + 3 * 4)
    assert [kind for _, kind in found.found] == [Kind.NEITHER]
    assert found.share(Kind.NEITHER) == 1 / 13 > MOST[Kind.NEITHER] and found.share(Kind.SCORES) == 0.0
    (said, scores) = found.lines()
    assert said == (
        "made up: 1 of 4 requests differ (0 a near tie of scores, 0 a near tie of a router, 1 not explained), 13 tokens"
    )
    assert scores.startswith("    scores, in standard deviations: 0% ")
