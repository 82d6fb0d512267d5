"""The expert that every token gets, in the kernels of those that are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
import torch

from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.choice import Choice  # noqa: E402
from runahead.runtime.kernels.layers import ExpertActivation, Experts, Linear, SharedExpert  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.kernels.triton.forward.unfused_products import product_of_rows  # noqa: E402
from runahead.runtime.kernels.triton.moe import grouped_gemm, sums  # noqa: E402
from runahead.runtime.kernels.triton.moe.layer import PackedExperts, router_of, scored_by  # noqa: E402
from runahead.runtime.kernels.triton.moe.routing import route  # noqa: E402
from runahead.runtime.kernels.triton.moe.tuning import FIRST_GATED, LAST  # noqa: E402
from runahead.runtime.models.weights import Pack, dummy_weights  # noqa: E402
from tests.runtime.kernels.expert_cases import CLOSE, HALF, Case, drawn  # noqa: E402
from tests.runtime.kernels.hybrid_configs import hybrid  # noqa: E402
from tests.runtime.kernels.matrix_units import multiply_as_matrix_units  # noqa: E402
from tests.runtime.kernels.predecessor import check  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]


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


@pytest.mark.parametrize(("width", "parts", "activation"), SHARED)
def test_a_norm_s_scale_goes_before_the_bias_and_into_every_piece(
    width: int, parts: tuple[str, ...], activation: ExpertActivation
) -> None:
    shared = shared_expert(width, 40, torch.float32, activation, parts)
    case = Case.of(13, 5, 2, "random", torch.float32, 40, 24, activation, shared)
    scale = 0.5 + drawn(13, seed=7).abs()
    scaled = replace(case, x=case.x * scale[:, None].to(DEVICE))
    assert relative_error(case.made(scale), scaled.expected()) < CLOSE[torch.float32]


def test_experts_and_a_share_are_scored_by_what_the_model_keeps_anyway() -> None:
    experts, share = layer_of_a_share(TritonKernelSet().pack_weight)
    router = router_of(experts).weight
    assert router.data_ptr() == experts.router.weight.data_ptr(), "what lies packed was copied"
    assert torch.equal(router, torch.cat((experts.router.weight, share[None])))


def test_where_a_router_is_packed_otherwise_a_share_keeps_its_own_memory_alone() -> None:
    experts, share = layer_of_a_share(lambda weight: weight.t().contiguous().t())
    assert share.untyped_storage().nbytes() == share.nbytes
    assert torch.equal(router_of(experts).weight, torch.cat((experts.router.weight, share[None])))


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_a_router_s_bias_is_in_the_scores_of_experts_and_not_in_a_share_s(dtype: torch.dtype) -> None:
    case = Case.of(7, 5, 2, "random", dtype, shared=shared_expert(64, 64, dtype, "silu", ("share",)))
    weights, bias = case.packed.weights, drawn(5, seed=8).to(DEVICE, dtype)
    router = PackedExperts.of(replace(weights, router=replace(weights.router, bias=bias))).router
    unbiased, found = case.scores.clone(), case.scores.clone()
    product_of_rows(case.x, case.packed.router, unbiased)
    product_of_rows(case.x, router, found)
    added = torch.cat((bias.float(), torch.zeros(1, device=DEVICE)))
    torch.testing.assert_close(found, unbiased + added, rtol=1e-5, atol=1e-5)


def layer_of_a_share(pack: Pack) -> tuple[Experts, torch.Tensor]:
    """The experts of a model that gives each token a share of the one beside them, and what makes it."""
    experts = dummy_weights(hybrid("Qwen3NextForCausalLM"), HALF, DEVICE, pack).layers[1].feed_forward
    assert isinstance(experts, Experts) and experts.shared is not None and experts.shared.gate is not None
    assert scored_by(experts) == experts.count + 1
    return experts, experts.shared.gate


def test_a_last_piece_is_less_deep_where_blocks_divide_the_others() -> None:
    shared = shared_expert(96, 64, HALF, "silu", ())
    case = Case.of(13, 5, 2, "random", HALF, 64, 64, shared=shared)
    assert relative_error(case.made(), case.expected()) < CLOSE[HALF]


def test_pieces_of_a_shared_expert_are_the_last_of_a_token_s_sum() -> None:
    """Experts that are chosen take each other away; what is small beside one of them stays only if it comes last."""
    tokens, hidden, small = 3, 40, 2.0**-30
    of_chosen = torch.tensor([1.0, -1.0] * tokens, device=DEVICE)[:, None].repeat(1, hidden)
    of_shared = torch.full((tokens, 2, hidden), small, device=DEVICE)
    live, out = torch.ones(tokens, dtype=torch.int32, device=DEVICE), torch.empty((tokens, hidden), device=DEVICE)
    sums.expert_sums(of_chosen, live, 2, out, of_shared=of_shared, added=False)
    assert out.eq(2 * small).all()


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize(("width", "parts", "activation"), SHARED)
@pytest.mark.parametrize("hidden", [40, 2080])
def test_a_lone_row_gets_the_shared_expert_s_too(
    hidden: int, width: int, parts: tuple[str, ...], activation: ExpertActivation, dtype: torch.dtype
) -> None:
    shared = shared_expert(width, hidden, dtype, activation, parts)
    case = Case.of(1, 5, 2, "random", dtype, hidden, 24, activation, shared)
    assert relative_error(case.added_to_a_lone_row(), case.expected_of_a_lone_row()) < CLOSE[dtype]


def test_a_masked_lone_row_gets_nothing_of_the_shared_expert_either() -> None:
    shared = shared_expert(48, 40, HALF, "silu", ("share",))
    case = Case.of(1, 5, 2, "random", HALF, 40, 24, shared=shared)
    masked = replace(case, live=torch.zeros_like(case.live))
    assert torch.equal(masked.added_to_a_lone_row(), case.x.cpu())
    assert not torch.equal(case.added_to_a_lone_row(), case.x.cpu())


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


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter runs one program after the other")
def test_each_kernel_waits_for_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them reads what a kernel before makes, nor writes, before it has waited. The shared expert has two
    pieces, beside experts as wide as the first."""
    torch.manual_seed(3)
    tokens, chosen, hidden, expert, wide = 3, 2, 128, 64, 96
    live, arrived = torch.ones(tokens, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    routed = route(torch.randn(tokens, 5), live, Choice(chosen, renormalised=True), arrived)
    x, first = torch.randn(tokens, hidden), torch.randn(5, 2 * expert, hidden)
    both, of_first = torch.full((tokens * chosen, expert), torch.nan), torch.full((tokens, wide), torch.nan)
    products = grouped_gemm.SharedProduct(Linear(torch.randn(2 * wide, hidden) * hidden**-0.5, None), wide, x, of_first)
    programs = len(routed.items) + 2

    def multiply() -> None:
        grouped_gemm.expert_product(x, first, routed, chosen, both, FIRST_GATED, shared=products)

    check(monkeypatch, grouped_gemm, [x], [both, of_first], multiply, programs * expert // 32)
    multiply()
    last, scores = torch.randn(5, hidden, expert), torch.randn(tokens, 6)
    results, of_shared = torch.full((tokens * chosen, hidden), torch.nan), torch.full((tokens, 2, hidden), torch.nan)
    downs = grouped_gemm.SharedProduct(Linear(torch.randn(hidden, wide), None), wide, of_first, of_shared, scores)

    def go_on() -> None:
        grouped_gemm.expert_product(both, last, routed, chosen, results, LAST, shared=downs)

    check(monkeypatch, grouped_gemm, [both, of_first, scores], [results, of_shared], go_on, programs * hidden // 64)
    go_on()
    residual = torch.randn(tokens, hidden)

    def add() -> None:
        sums.expert_sums(results, live, chosen, residual, of_shared=of_shared, added=True)

    check(monkeypatch, sums, [results, of_shared, residual], [residual], add, tokens)
