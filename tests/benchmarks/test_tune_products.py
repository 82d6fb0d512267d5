"""Which products are tuned: those of the benchmarks' shapes, by the shapes' own numbers."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.runtime.kernels.triton_device import triton_device

triton_device()

from benchmarks.tune.products import jobs, products, rows_candidates  # noqa: E402
from runahead.runtime.kernels.triton import tilings  # noqa: E402
from runahead.runtime.kernels.triton.row_product import ADD, GATED, STORE  # noqa: E402
from runahead.runtime.kernels.triton.tiling_counts import LayerProduct  # noqa: E402
from runahead.runtime.kernels.triton.tilings import RowTiling, Tiling, tiling_key  # noqa: E402


def test_a_dense_shape_has_four_products_a_layer_and_the_head() -> None:
    assert products("8B") == (
        LayerProduct(6144, 4096, STORE, True),
        LayerProduct(4096, 4096, ADD, False),
        LayerProduct(28672, 4096, GATED, True),
        LayerProduct(4096, 14336, ADD, False),
        LayerProduct(128256, 4096, STORE, False),
    )


def test_of_models_with_experts_all_is_tuned_here_but_the_experts_own() -> None:
    assert products("30B-A3B") == (
        LayerProduct(5120, 2048, STORE, True),
        LayerProduct(2048, 4096, ADD, False),
        LayerProduct(128, 2048, STORE, True),
        LayerProduct(151936, 2048, STORE, False),
    )


def test_of_recurrent_layers_all_products_are_tuned_and_of_experts_the_router_s() -> None:
    assert products("7B-A1B") == (
        LayerProduct(6448, 1536, STORE, True),
        LayerProduct(1536, 3072, ADD, False),
        LayerProduct(64, 1536, STORE, True),
        LayerProduct(2560, 1536, STORE, True),
        LayerProduct(1536, 1536, ADD, False),
        LayerProduct(100352, 1536, STORE, False),
    )


def test_each_product_of_each_number_of_rows_has_ways_to_be_cut() -> None:
    found = list(jobs(["30B-A3B", "7B-A1B"], [1, 8, 64], 30, False))
    assert len(found) == (4 + 6) * 3
    assert [job for job in found if not job.candidates] == []


@pytest.mark.parametrize(("rows", "taken"), [(8, {8}), (16, {16}), (32, {16, 32}), (64, {32, 64})])
def test_from_32_rows_on_a_program_may_have_half_of_them(rows: int, taken: set[int]) -> None:
    """Where a program has all, `columns` is no less than they are."""
    ways = list(rows_candidates(LayerProduct(5120, 2048, STORE, True), rows))
    assert {min(way.columns, rows) for way in ways} == taken
    head = list(rows_candidates(LayerProduct(151936, 2048, STORE, False), rows))
    assert {min(way.columns, rows) for way in head} == {rows}, "of a vocabulary every program reads as much"


@pytest.mark.parametrize(("rows", "way"), [(1, RowTiling(32, 16, 1, 4)), (8, Tiling(16, 48, 1, 2, 4))])
def test_what_the_table_has_is_measured_beside_what_may_replace_it(
    monkeypatch: pytest.MonkeyPatch, rows: int, way: RowTiling | Tiling
) -> None:
    product, *_ = products("7B-A1B")
    key = tiling_key(product.outputs, product.depth, rows, "store")
    monkeypatch.setattr(tilings, "_measured", lambda: {key: asdict(way)})
    of_product = next(job for job in jobs(["7B-A1B"], [rows], 2, False) if job.product == product)
    assert of_product.candidates[0] == way and len(of_product.candidates) == 1 + 2 * 2
