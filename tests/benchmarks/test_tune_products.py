"""Which products are tuned: those of the benchmarks' shapes, by the shapes' own numbers."""

from __future__ import annotations

from tests.runtime.kernels.triton_device import triton_device

triton_device()

from benchmarks.tune.products import Product, jobs, products  # noqa: E402
from runahead.runtime.kernels.triton.row_product import ADD, GATED, STORE  # noqa: E402


def test_a_dense_shape_has_four_products_a_layer_and_the_head() -> None:
    assert products("8B") == (
        Product(6144, 4096, STORE, True),
        Product(4096, 4096, ADD, False),
        Product(28672, 4096, GATED, True),
        Product(4096, 14336, ADD, False),
        Product(128256, 4096, STORE, False),
    )


def test_of_models_with_experts_attention_and_the_head_are_tuned_here() -> None:
    assert products("30B-A3B") == (
        Product(5120, 2048, STORE, True),
        Product(2048, 4096, ADD, False),
        Product(151936, 2048, STORE, False),
    )
    assert products("7B-A1B") == (
        Product(2560, 1536, STORE, True),
        Product(1536, 1536, ADD, False),
        Product(100352, 1536, STORE, False),
    )


def test_each_product_of_each_number_of_rows_has_ways_to_be_cut() -> None:
    found = list(jobs(["30B-A3B", "7B-A1B"], [1, 8, 64], 30, False))
    assert len(found) == 6 * 3
    assert [job for job in found if not job.candidates] == []
