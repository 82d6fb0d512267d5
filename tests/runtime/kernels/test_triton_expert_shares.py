"""Experts' kernels where ranks divide the width of each expert: all choose the same experts, and add partial sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.choice import Choice  # noqa: E402
from runahead.runtime.kernels.layers import Linear, SharedExpert  # noqa: E402
from runahead.runtime.kernels.ranks import Shard  # noqa: E402
from runahead.runtime.kernels.triton.moe.layer import PackedExperts  # noqa: E402
from runahead.runtime.models.blocks.mixer_shards import part_of_width  # noqa: E402
from tests.runtime.kernels.expert_cases import Case, drawn  # noqa: E402
from tests.runtime.kernels.matrix_units import multiply_as_matrix_units  # noqa: E402
from tests.runtime.kernels.test_expert_shares import ranks  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]
GROUPED = Choice(3, True, "logistic", groups=4, chosen_groups=2, scale=2.5)


def part_of(case: Case, shard: Shard) -> Case:
    """What a rank has of a layer: a part of each expert's width, and of the shared one's."""
    weights, pieces = case.packed.weights, 2 if case.packed.has_gates else 1

    def narrow(first: Linear, last: Linear) -> tuple[Linear, Linear]:
        width = last.weight.shape[1]
        outputs, inputs = part_of_width(width, shard, pieces=pieces)
        assert outputs is not None and inputs is not None
        bias = None if first.bias is None else first.bias[outputs]
        own = last.weight[:, inputs.start : inputs.stop].contiguous()
        return Linear(first.weight[outputs].contiguous(), bias), Linear(own, last.bias if shard.is_first else None)

    both = zip(weights.gate_up, weights.down, strict=True)
    gate_up, down = zip(*[narrow(first, last) for first, last in both], strict=True)
    shared = weights.shared
    if shared is not None:
        shared = SharedExpert(*narrow(shared.gate_up, shared.down), shared.gate)
    return replace(case, packed=PackedExperts.of(replace(weights, gate_up=gate_up, down=down, shared=shared)))


def sums_of_ranks(case: Case, of: int) -> Iterator[torch.Tensor]:
    return (part_of(case, shard).made() for shard in ranks(of))


def shared_of(width: int, *, bias: bool = False) -> SharedExpert:
    def linear(rows: int, columns: int, seed: int) -> Linear:
        weight = (drawn(rows, columns, seed=seed) * columns**-0.5).to(DEVICE)
        return Linear(weight, drawn(rows, seed=seed + 1).to(DEVICE) if bias else None)

    gate = None if bias else drawn(64, seed=9).to(DEVICE)
    return SharedExpert(linear(2 * width, 64, 6), linear(64, width, 8), gate)


@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize(
    ("tokens", "experts", "choice", "further"),
    [
        (9, 8, 3, {}),
        (70, 8, 3, {"activation": "squared_relu"}),
        (9, 4, 1, {"width": 96}),  # parts that blocks of the depth do not divide
        (13, 8, GROUPED, {}),
        (9, 8, 3, {"shared": shared_of(160)}),
        (9, 8, 3, {"shared": shared_of(128, bias=True)}),
    ],
)
def test_the_ranks_sums_add_up_to_the_whole_layer_s(
    tokens: int, experts: int, choice: int | Choice, further: dict[str, Any], of: int
) -> None:
    case = Case.of(tokens, experts, choice, "random", torch.float32, **further)
    parts = torch.stack(list(sums_of_ranks(case, of)))
    assert parts[:, case.live.cpu() == 0].eq(0).all()
    assert relative_error(parts.sum(0), case.made()) < 1e-6
    assert relative_error(parts.sum(0), case.expected()) < 1e-5


@pytest.mark.parametrize("of", [2, 4])
def test_a_token_s_partial_sum_has_the_bits_that_it_has_alone(of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    case = Case.of(70, 8, 3, "random", torch.bfloat16, width=128, hidden=64)
    for shard in ranks(of):
        part = part_of(case, shard)
        together = part.made()
        for token in (0, 17, 69):
            assert torch.equal(part.some([token]).made()[0], together[token])
