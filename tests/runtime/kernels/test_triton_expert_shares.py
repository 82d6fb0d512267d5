"""Experts' kernels where ranks have the experts between them: all choose among all, and each reads its own alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.choice import Choice  # noqa: E402
from runahead.runtime.kernels.layers import ExpertActivation, Linear  # noqa: E402
from runahead.runtime.kernels.share import Share, ShareError  # noqa: E402
from runahead.runtime.kernels.triton.moe import gemv, routing  # noqa: E402
from runahead.runtime.kernels.triton.moe.layer import PackedExperts  # noqa: E402
from runahead.runtime.kernels.triton.moe.routing import Routing, route  # noqa: E402
from tests.runtime.kernels.expert_cases import Case  # noqa: E402
from tests.runtime.kernels.matrix_units import multiply_as_matrix_units  # noqa: E402
from tests.runtime.kernels.test_expert_shares import ranks  # noqa: E402
from tests.runtime.kernels.test_triton_expert_layers import entries_by_expert  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]
GROUPED = Choice(3, True, "logistic", groups=4, chosen_groups=2, scale=2.5)


def part_of(case: Case, share: Share) -> Case:
    """What a rank has of a layer. Its experts lie in the middle of others', which are no numbers there."""
    weights = case.packed.weights
    own = share.part_of(weights.count, "experts")

    def own_of(whole: torch.Tensor) -> tuple[Linear, ...]:
        spoilt = torch.full_like(whole, torch.nan)
        spoilt[own.start : own.stop] = whole[own.start : own.stop]
        return tuple(Linear(weight, None) for weight in spoilt[own.start : own.stop])

    part = replace(weights, gate_up=own_of(case.packed.gate_up), down=own_of(case.packed.down), share=share)
    packed = PackedExperts.of(part)
    assert packed.gate_up.storage_offset() == own.start * packed.gate_up[0].numel(), "the others do not lie beside them"
    return replace(case, packed=packed)


def listed(case: Case, share: Share, together: bool = False) -> Routing:
    arrived = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found = route(case.scores, case.live, case.packed.weights.choice, arrived, share=share, together=together)
    assert int(arrived) == 0
    return found


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize(
    ("tokens", "experts", "choice", "kind"),
    [
        (9, 12, 3, "ties"),
        (64, 8, 2, "all choose one"),
        (70, 8, 3, "random"),
        (200, 4, 4, "random"),
        (9, 8, GROUPED, ""),
    ],
)
def test_tokens_are_listed_for_each_expert_by_exactly_one_rank(
    tokens: int, experts: int, choice: int | Choice, kind: str, of: int, together: bool
) -> None:
    case = Case.of(tokens, experts, choice, kind, torch.float32, hidden=16, width=16)
    whole = listed(case, Share(), together)
    expected, found, live = entries_by_expert(whole), dict[int, list[int]](), case.live.bool()
    for share in ranks(of):
        part, begin = listed(case, share, together), share.part_of(experts, "experts").start
        assert torch.equal(part.routing_weights.view(tokens, -1)[live], whole.routing_weights.view(tokens, -1)[live])
        found |= {begin + number: entries for number, entries in entries_by_expert(part).items()}
        assert len(part.entries) == experts // of
    assert found == expected


def sums_of_ranks(case: Case, of: int) -> Iterator[torch.Tensor]:
    return (part_of(case, share).made() for share in ranks(of))


@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize(
    ("tokens", "experts", "choice", "activation"),
    [(9, 8, 3, "silu"), (70, 8, 3, "squared_relu"), (9, 4, 1, "silu"), (13, 8, GROUPED, "silu")],
)
def test_the_ranks_sums_add_up_to_the_whole_layer_s(
    tokens: int, experts: int, choice: int | Choice, activation: ExpertActivation, of: int
) -> None:
    case = Case.of(tokens, experts, choice, "random", torch.float32, activation=activation)
    parts = torch.stack(list(sums_of_ranks(case, of)))
    assert parts[:, case.live.cpu() == 0].eq(0).all()
    assert relative_error(parts.sum(0), case.made()) < 1e-6
    assert relative_error(parts.sum(0), case.expected()) < 1e-5


@pytest.mark.parametrize("tokens", [9, 70])
def test_the_sum_of_two_terms_has_the_whole_layer_s_bits_whoever_has_them(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    case = Case.of(tokens, 8, 2, "random", torch.float32)
    first, second, third, last = sums_of_ranks(case, 4)
    assert torch.equal(first + second + third + last, case.made())


@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize(("experts", "choice"), [(8, Choice(3, True)), (8, GROUPED), (4, Choice(1, False))])
def test_what_the_ranks_add_to_a_lone_row_adds_up(experts: int, choice: Choice, of: int) -> None:
    case = Case.of(1, experts, choice, "random", torch.float32, hidden=40, width=24)

    def added(case: Case) -> torch.Tensor:
        residual = case.x.clone()
        case.packed.add_of_one_row(residual, case.scores, case.live, dependent=False)
        return (residual - case.x).cpu()

    parts = [added(part_of(case, share)) for share in ranks(of)]
    others = [part for part in parts if not part.any()]
    assert choice.chosen > 1 or len(others) == of - 1, "one expert, and so one rank"
    assert relative_error(torch.stack(parts).sum(0), added(case)) < 1e-5


def test_a_masked_lone_row_is_left_as_it_is_by_every_rank() -> None:
    case = Case.of(1, 8, 3, "random", torch.float32)
    for share in ranks(2):
        residual, part = case.x.clone(), part_of(case, share)
        part.packed.add_of_one_row(residual, part.scores, torch.zeros_like(part.live), dependent=False)
        assert torch.equal(residual, case.x)


def test_a_whole_share_asks_for_the_kernels_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a share has in them is left out by their constants."""
    asked: dict[str, dict[str, Any]] = {}

    class Seen:
        def __init__(self, name: str, kernel: Any) -> None:
            self._name, self._kernel = name, kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **options: Any) -> None:
                asked[self._name] = options
                self._kernel[grid](*arguments, **options)

            return launch

    for module, names in (
        (routing, ("_route_kernel", "_list_kernel", "_route_few_kernel")),
        (gemv, ("_gate_up_kernel", "_down_kernel")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Seen(name, getattr(module, name)))
    Case.of(70, 8, 3, "random", torch.float32).made()
    lone = Case.of(1, 8, 3, "random", torch.float32)
    lone.packed.add_of_one_row(lone.x.clone(), lone.scores, lone.live, dependent=False)
    few = Case.of(5, 8, 3, "random", torch.float32)
    routing.route(few.scores, few.live, Choice(3, True), few.live[:1], together=True)
    for name in ("_list_kernel", "_route_few_kernel", "_gate_up_kernel"):
        assert (asked[name]["BEGIN"], asked[name]["OWN"]) == (0, asked[name]["COUNT"])
    assert asked["_list_kernel"]["PADDED_OWN"] == asked["_route_kernel"]["PADDED"]
    assert asked["_down_kernel"]["OWN"] == 0


def test_ranks_that_do_not_divide_experts_are_refused_by_a_sentence() -> None:
    case = Case.of(3, 8, 2, "random", torch.float32)
    with pytest.raises(ShareError, match="3 ranks can't have equal parts of 8 experts"):
        listed(case, Share(0, 3))
