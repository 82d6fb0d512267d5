"""Which kernels a start on a GPU takes, the exact ones or the fastest: by what was asked for."""

from __future__ import annotations

import pytest
import torch

from runahead.runtime.kernels.triton.forward.exactness import choose_exactness, why_impossible
from runahead.runtime.models.weights import described
from tests.gpu.gpu_chain import small_config


@pytest.mark.parametrize("impossible", ["", "there are none"])
def test_the_fastest_kernels_are_the_default_and_the_reason_is_said(impossible: str) -> None:
    chosen = choose_exactness("auto", impossible)
    assert not chosen.exact and chosen.why and impossible in chosen.why


def test_whoever_asks_has_it() -> None:
    for asked, exact in (("on", True), ("off", False)):
        chosen = choose_exactness(asked, "")
        assert (chosen.exact, chosen.why) == (exact, "asked for")


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
