"""How experts' products are cut: what the table has fits, is found, and leaves every bit as it is."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.choice import Choice  # noqa: E402
from runahead.runtime.kernels.triton.gemm import tuning  # noqa: E402
from runahead.runtime.kernels.triton.moe.grouped_gemm import expert_product  # noqa: E402
from runahead.runtime.kernels.triton.moe.routing import route  # noqa: E402
from runahead.runtime.kernels.triton.moe.tuning import (  # noqa: E402
    FIRST_GATED,
    FIRST_SQUARED,
    LAST,
    ExpertProduct,
    ExpertTiling,
    expert_tiling,
)
from tests.runtime.kernels.matrix_units import multiply_as_matrix_units  # noqa: E402

ENTRIES = [
    (gpu, key, entry)
    for gpu, table in json.loads(tuning.TABLE.read_text()).items()
    for key, entry in table.items()
    if " experts of " in key
]
WHICH = {"gated": FIRST_GATED, "squared": FIRST_SQUARED, "last": LAST}


def named(key: str) -> tuple[ExpertProduct, int]:
    """The product that the table calls so, and of how many tokens."""
    experts, _, _, size, which, tokens = key.split()
    chosen, count = map(int, experts.split("/"))
    outputs, depth = map(int, size.split("x"))
    return ExpertProduct(WHICH[which], chosen, count, outputs, depth, itemsize=2), int(tokens)


def test_measured_tilings_of_experts_fit_their_products() -> None:
    assert {key.split()[-1] for _, key, _ in ENTRIES} == {"2", "8", "32", "64"}
    for gpu, key, entry in ENTRIES:
        product, tokens = named(key)
        name = f"{gpu}: {key}"
        assert product.key(tokens) == key and product.outputs >= entry["rows"], name
        assert all(entry[of].bit_count() == 1 for of in ("rows", "warps")), name
        several = ExpertTiling(**entry)
        assert several.rows * product.halves >= 16 and several.warps in (4, 8), name
        assert product.depth % several.block == 0 and 2 <= several.stages <= 6, name


def test_experts_are_cut_as_the_table_says_up_to_the_next_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    product = ExpertProduct(FIRST_GATED, 2, 8, 64, 128, itemsize=2)
    several = ExpertTiling(32, 64, 3, 4)
    table = {product.key(8): asdict(several)}
    monkeypatch.setattr(tuning, "_measured", lambda: table)
    assert list(table) == ["2/8 experts of 64x128 gated 8"]
    assert [expert_tiling(product, tokens, 16) == several for tokens in (1, 2, 4, 5, 8, 9)] == [
        False, False, False, True, True, False,
    ]  # fmt: skip
    for other in (
        replace(product, which=LAST),
        replace(product, chosen=1),
        replace(product, experts=4),
        replace(product, depth=64),
        replace(product, itemsize=4),
    ):
        assert expert_tiling(other, 8, 16).rows == 64 // other.halves, "nothing was measured of it"


def products_of(product: ExpertProduct, tokens: int) -> torch.Tensor:
    """What is left of so many tokens, of which a further one is the same as one of fewer: [tokens, chosen, outputs]."""
    assert product.itemsize == 2

    def drawn(*sizes: int) -> torch.Tensor:
        draw = torch.Generator(DEVICE).manual_seed(sum(sizes[1:]))
        rows = (torch.randn(sizes[1:], generator=draw, device=DEVICE) for _ in range(sizes[0]))
        return torch.stack([row.bfloat16() for row in rows])

    chosen, width = product.chosen, product.outputs * product.halves
    weight = drawn(product.experts, width, product.depth)
    scores = drawn(tokens, product.experts).float()
    live = torch.ones(tokens, dtype=torch.int32, device=DEVICE)
    arrived = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    routed = route(scores, live, Choice(chosen, renormalised=True), arrived)
    x = drawn(tokens, chosen if product.which == LAST else 1, product.depth).flatten(0, 1)
    dtype = torch.float32 if product.which == LAST else torch.bfloat16
    out = torch.full((tokens * chosen, product.outputs), torch.nan, dtype=dtype, device=DEVICE)
    expert_product(x, weight, routed, chosen, out, product.which)
    assert bool(out.isfinite().all())
    return out.view(tokens, chosen, product.outputs)


def check_bits(monkeypatch: pytest.MonkeyPatch, key: str, table: dict[str, Any]) -> None:
    product, tokens = named(key)
    monkeypatch.setattr(tuning, "_measured", lambda: table)
    cut = products_of(product, tokens)
    monkeypatch.setattr(tuning, "_measured", dict)
    assert torch.equal(cut, products_of(product, tokens)), f"{key}: bits are others than by the default"
    assert torch.equal(cut[:3], products_of(product, 3)[:tokens]), f"{key}: bits depend on the number of tokens"


@pytest.mark.parametrize("which", WHICH)
def test_a_cut_leaves_every_bit(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    key = f"2/5 experts of 128x64 {which} 8"
    check_bits(monkeypatch, key, {key: asdict(ExpertTiling(64 // named(key)[0].halves, 32, 3, 4))})


@pytest.mark.gpu
def test_what_was_measured_leaves_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    table, several = tuning._measured(), 0
    assert table, "nothing was measured for this GPU"
    for _, key, _ in ENTRIES:
        if key in table:
            check_bits(monkeypatch, key, table)
            several += 1
    assert several >= 8
