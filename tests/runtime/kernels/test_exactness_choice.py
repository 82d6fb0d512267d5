"""Which kernels a start on a GPU takes, the exact ones or the fastest: by what was asked for."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_table.shapes import SHAPES
from runahead.runtime.kernels.triton.forward.exactness import choose_exactness, costs_little, why_impossible
from runahead.runtime.models.weights import described
from tests.gpu.gpu_chain import small_config


@pytest.mark.parametrize("impossible", ["", "there are none"])
def test_without_exact_kernels_or_with_costly_ones_the_fastest_are_the_default(impossible: str) -> None:
    chosen = choose_exactness("auto", impossible, cheap=bool(impossible))
    assert not chosen.exact and chosen.why and impossible in chosen.why


def test_exact_kernels_that_cost_little_are_the_default() -> None:
    chosen = choose_exactness("auto", "", cheap=True)
    assert chosen.exact and chosen.why


@pytest.mark.parametrize("cheap", [True, False])
def test_an_explicit_setting_is_followed(cheap: bool) -> None:
    for asked, exact in (("on", True), ("off", False)):
        chosen = choose_exactness(asked, "", cheap)
        assert (chosen.exact, chosen.why) == (exact, "asked for")


@pytest.mark.parametrize(
    ("name", "cheap"), [("8B", True), ("0.6B", False), ("9B-hybrid", False), ("30B-A3B", False), ("7B-A1B", False)]
)
def test_large_dense_models_are_exact_by_default(name: str, cheap: bool) -> None:
    assert costs_little(described(SHAPES[name].described()).layers) is cheap


def test_there_are_exact_kernels_for_bfloat16_and_depths_that_the_matrix_units_take() -> None:
    fits = described(small_config(intermediate_size=128)).layers
    assert why_impossible(fits, torch.bfloat16) == ""
    for dtype, name in ((torch.float32, "float32"), (torch.float16, "float16")):
        why = why_impossible(fits, dtype)
        assert why == f"the exact kernels are for bfloat16, and the model is served in {name}"
    odd = described(small_config(intermediate_size=96)).layers
    assert why_impossible(odd, torch.bfloat16) == (
        "tiles of the exact kernels do not divide the 96 numbers that a product of the model sums"
    )
