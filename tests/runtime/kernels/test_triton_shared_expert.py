"""The expert that every token gets, in the kernels of those that are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
import torch

from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import ExpertActivation, Linear, SharedExpert  # noqa: E402
from runahead.runtime.kernels.share import Share  # noqa: E402
from runahead.runtime.kernels.triton.expert_layers import PackedExperts  # noqa: E402
from runahead.runtime.kernels.triton.expert_tilings import DOWNS  # noqa: E402
from tests.runtime.kernels.expert_cases import CLOSE, HALF, Case, drawn  # noqa: E402
from tests.runtime.kernels.matrix_units import multiply_as_matrix_units  # noqa: E402
from tests.runtime.kernels.poisoned_memory import poison_new_memory  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def shared_expert(
    width: int, hidden: int, dtype: torch.dtype, activation: ExpertActivation, parts: tuple[str, ...]
) -> SharedExpert:
    """Random. parts: of a bias and a share, those that it has."""
    outputs = (2 if activation == "silu" else 1) * width

    def linear(rows: int, columns: int, seed: int) -> Linear:
        bias = drawn(rows, seed=seed + 1).to(DEVICE, dtype) if "bias" in parts else None
        return Linear((drawn(rows, columns, seed=seed) * columns**-0.5).to(DEVICE, dtype), bias)

    share = drawn(hidden, seed=14).to(DEVICE, dtype) if "share" in parts else None
    return SharedExpert(linear(outputs, hidden, 10), linear(hidden, width, 12), share)


# Width of the shared expert beside others of 24, what it has, and how all of them are activated: as wide as another, by
# pieces, by pieces of which the last is less wide, less wide than another.
SHARED: Final[list[tuple[int, tuple[str, ...], ExpertActivation]]] = [
    (24, ("share",), "silu"),
    (48, (), "silu"),
    (48, ("bias", "share"), "squared_relu"),
    (56, ("bias",), "silu"),
    (8, ("share",), "squared_relu"),
]


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize(("width", "parts", "activation"), SHARED)
@pytest.mark.parametrize("tokens", [13, 40])
def test_every_token_gets_the_shared_expert_s_too(
    tokens: int, width: int, parts: tuple[str, ...], activation: ExpertActivation, dtype: torch.dtype
) -> None:
    shared = shared_expert(width, 40, dtype, activation, parts)
    case = Case.of(tokens, 5, 2, "random", dtype, 40, 24, activation, shared)
    found = case.made()
    assert found[case.live.cpu() == 0].eq(0).all()
    assert relative_error(found, case.expected()) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize(("width", "parts", "activation"), SHARED)
@pytest.mark.parametrize("hidden", [40, 2080])
def test_a_lone_row_gets_the_shared_expert_s_too(
    hidden: int, width: int, parts: tuple[str, ...], activation: ExpertActivation, dtype: torch.dtype
) -> None:
    shared = shared_expert(width, hidden, dtype, activation, parts)
    case = Case.of(1, 5, 2, "random", dtype, hidden, 24, activation, shared)
    assert relative_error(case.added_to_a_lone_row(), case.expected_of_a_lone_row()) < CLOSE[dtype]


def test_a_shared_expert_that_is_wider_than_a_program_asks_for_at_once() -> None:
    shared = shared_expert(2 * DOWNS.weights // DOWNS.rows + 8, 24, torch.float32, "silu", ("bias", "share"))
    case = Case.of(1, 5, 2, "random", torch.float32, 24, 24, shared=shared)
    assert relative_error(case.added_to_a_lone_row(), case.expected_of_a_lone_row()) < 1e-5


def test_a_masked_lone_row_gets_nothing_of_the_shared_expert_either() -> None:
    shared = shared_expert(48, 40, HALF, "silu", ("share",))
    case = Case.of(1, 5, 2, "random", HALF, 40, 24, shared=shared)
    masked = replace(case, live=torch.zeros_like(case.live))
    assert torch.equal(masked.added_to_a_lone_row(), case.x.cpu())
    assert not torch.equal(case.added_to_a_lone_row(), case.x.cpu())


@pytest.mark.parametrize("tokens", [1, 9])
def test_of_two_ranks_the_first_has_the_shared_expert(tokens: int) -> None:
    """Whose router makes one score more."""
    shared = shared_expert(48, 40, torch.float32, "silu", ("share",))
    case = Case.of(tokens, 8, 3, "random", torch.float32, 40, 24, shared=shared)
    weights = case.packed.weights

    def added(case: Case) -> torch.Tensor:
        return case.added_to_a_lone_row() - case.x.cpu() if tokens == 1 else case.made()

    def of_rank(rank: int) -> Case:
        share, own = Share(rank, 2), slice(4 * rank, 4 * rank + 4)
        part = replace(
            weights, gate_up=weights.gate_up[own], down=weights.down[own], share=share,
            shared=shared if rank == 0 else None,
        )  # fmt: skip
        packed = PackedExperts.of(part)
        return replace(case, packed=packed, scores=case.scores[:, : packed.scored].contiguous())

    assert relative_error(added(of_rank(0)) + added(of_rank(1)), added(case)) < 1e-5


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_a_token_s_bits_do_not_hang_on_who_gets_the_shared_expert_s_beside_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    shared = shared_expert(128, 64, dtype, "silu", ("share",))
    case = Case.of(60, 5, 3, "random", dtype, shared=shared)
    whole = case.made()
    for tokens in (torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist(), [7], [59, 7, 1, 2]):
        assert torch.equal(case.some(tokens).made(), whole[tokens])
