"""Experts on the CPU: who is sent where, in which order the shares are added up, and that nobody else matters."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import ExpertActivation, Experts, Linear, Norm, SharedExpert
from runahead.runtime.kernels.ranks import Shard
from runahead.runtime.kernels.reference.experts import BoundExperts, ExpertBuffers, live_tokens, route
from runahead.runtime.kernels.reference.linear import Products, choose_products
from runahead.runtime.kernels.reference.ops import Buffers, NormWeight
from runahead.runtime.models.blocks.mixer_shards import part_of_width

HIDDEN, WIDTH, COUNT, SHARED = 24, 16, 7, 12


def routed(
    scores: list[list[float]], chosen: int, renormalised: bool = False, **further: Any
) -> list[dict[int, float]]:
    """By token, the share of each expert that it is sent to. further: of the choice."""
    found: list[dict[int, float]] = [{} for _ in scores]
    everybody, choice = np.arange(len(scores)), Choice(chosen, renormalised, **further)
    for group in route(np.array(scores, np.float32), everybody, choice):
        for token, share in zip(group.tokens.tolist(), group.routing_weights[:, 0].tolist(), strict=True):
            found[token][group.expert] = share
    return found


def test_the_highest_scores_choose_and_shares_are_a_softmax_over_all_experts() -> None:
    (found,) = routed([[0.0, 2.0, 1.0, -1.0]], chosen=2)
    exponents = np.exp([0.0, 2.0, 1.0, -1.0])
    assert found == pytest.approx({1: exponents[1] / exponents.sum(), 2: exponents[2] / exponents.sum()}, rel=1e-6)


def test_shares_add_up_to_one_where_they_are_renormalised() -> None:
    (found,) = routed([[0.0, 2.0, 1.0, -1.0]], chosen=3, renormalised=True)
    assert set(found) == {0, 1, 2}
    assert sum(found.values()) == pytest.approx(1.0, rel=1e-6)


def test_of_equal_scores_the_lowest_numbers_are_chosen() -> None:
    assert [sorted(found) for found in routed([[1.0] * 5, [0.0, 3.0, 3.0, 3.0, 4.0]], chosen=2)] == [[0, 1], [1, 4]]


def test_scores_that_are_far_apart_leave_no_share_that_is_not_a_number() -> None:
    with np.errstate(over="ignore"):  # as a forward computes
        (found,) = routed([[-3e38, 3e38, 0.0]], chosen=2, renormalised=True)
    assert found[1] == 1.0
    assert all(np.isfinite(share) for share in found.values())


def test_a_score_that_is_no_number_is_in_all_of_its_token_s_shares_and_in_no_other_s() -> None:
    broken, sound = routed([[0.0, float("nan"), 1.0], [0.0, 2.0, 1.0]], chosen=2, renormalised=True)
    assert all(np.isnan(share) for share in broken.values())
    assert all(np.isfinite(share) for share in sound.values())


def logistic(score: float) -> float:
    return 1.0 / (1.0 + math.exp(-score))


def test_by_the_logistic_function_a_share_is_the_experts_own() -> None:
    (found,) = routed([[0.0, 2.0, 1.0, -1.0]], chosen=2, scoring="logistic")
    assert found == pytest.approx({1: logistic(2.0), 2: logistic(1.0)}, rel=1e-6)
    (found,) = routed([[0.0, 2.0, 1.0, -1.0]], chosen=2, renormalised=True, scoring="logistic", scale=2.5)
    assert sum(found.values()) == pytest.approx(2.5, rel=1e-6)
    assert found[1] / found[2] == pytest.approx(logistic(2.0) / logistic(1.0), rel=1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "logistic"])
def test_a_correction_chooses_and_is_in_no_share(scoring: str) -> None:
    correction = torch.tensor([0.0, -9.0, 0.0, 1.0])
    (found,) = routed([[0.0, 2.0, 1.0, -1.0]], chosen=2, scoring=scoring, correction=correction)
    exponents = np.exp([0.0, 2.0, 1.0, -1.0])
    values = exponents / exponents.sum() if scoring == "softmax" else exponents / (1.0 + exponents)
    assert found == pytest.approx({2: values[2], 3: values[3]}, rel=1e-6)


def test_only_the_best_groups_are_chosen_from_by_their_two_highest() -> None:
    # The highest of all is in the first group, whose others are low; the third has two that are high.
    scores = [[5.0, -6.0, -6.0, 1.0, 0.0, -6.0, 2.0, -1.5, 2.0]]
    assert sorted(routed(scores, chosen=3, scoring="logistic", groups=3, chosen_groups=1)[0]) == [6, 7, 8]
    assert sorted(routed(scores, chosen=3, scoring="logistic", groups=3, chosen_groups=2)[0]) == [3, 6, 8]
    assert sorted(routed(scores, chosen=3, scoring="logistic", groups=3, chosen_groups=3)[0]) == [0, 6, 8]
    assert sorted(routed(scores, chosen=2, groups=3, chosen_groups=1)[0]) == [0, 1], "by the softmax"


def test_a_correction_counts_for_groups_too() -> None:
    correction = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.9, 0.9])
    scores = [[3.0, 2.0, 1.0, 1.0, -3.0, -3.0]]
    (found,) = routed(scores, chosen=2, scoring="logistic", correction=correction, groups=3, chosen_groups=1)
    assert found == pytest.approx({4: logistic(-3.0), 5: logistic(-3.0)}, rel=1e-6)


def test_of_equal_groups_the_first_and_of_equal_values_the_lowest_numbers_are_chosen() -> None:
    found = routed([[1.0] * 6, [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]], 2, scoring="logistic", groups=3, chosen_groups=2)
    assert [sorted(each) for each in found] == [[0, 1], [3, 4]]
    correction = torch.zeros(6)
    found = routed([[1.0] * 6, [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]], 2, correction=correction)
    assert [sorted(each) for each in found] == [[0, 1], [3, 4]]


def test_where_no_value_is_left_shares_are_zero_and_not_no_number() -> None:
    with np.errstate(over="ignore"):  # as a forward computes
        (found,) = routed([[-3e38] * 4], chosen=2, renormalised=True, scoring="logistic")
    assert found == {0: 0.0, 1: 0.0}


def test_one_score_that_is_no_number_is_in_all_shares_by_the_logistic_function_too() -> None:
    broken, sound = routed(
        [[0.0, float("nan"), 1.0, 2.0], [0.0, 2.0, 1.0, 1.0]], 2, scoring="logistic", groups=2, chosen_groups=1
    )
    assert len(broken) == 2 and all(np.isnan(share) for share in broken.values())
    assert all(np.isfinite(share) for share in sound.values())


def test_groups_come_by_ascending_expert_and_a_group_s_tokens_ascend() -> None:
    scores = np.random.default_rng(3).standard_normal((40, COUNT)).astype(np.float32)
    groups = list(route(scores, np.arange(40), Choice(3, renormalised=True)))
    experts = [group.expert for group in groups]
    assert experts == sorted(set(experts))
    assert all(np.all(np.diff(group.tokens) > 0) for group in groups)
    assert sum(group.tokens.size for group in groups) == 40 * 3


def test_tokens_of_masked_rows_are_not_live() -> None:
    batch = ForwardBatch(
        token_ids=torch.zeros(7, dtype=torch.int64),
        positions=torch.zeros(7, dtype=torch.int64),
        slot_mapping=torch.zeros(7, dtype=torch.int64),
        query_start_loc=torch.tensor([0, 1, 4, 5, 7], dtype=torch.int32),
        seq_lens=torch.tensor([5, 0, 9, 2], dtype=torch.int32),
        block_tables=torch.zeros((4, 1), dtype=torch.int32),
        num_tokens=7,
        num_rows=4,
        max_seq_len=9,
        is_decode=False,
    )
    assert live_tokens(batch).tolist() == [0, 4, 5, 6]


class Layer:
    """Experts with random weights, and what they add to rows of a residual."""

    def __init__(
        self,
        chosen: int,
        renormalised: bool,
        *,
        shared: bool = False,
        share: bool = False,
        activation: ExpertActivation = "silu",
        count: int = COUNT,
        **further: Any,
    ) -> None:
        self.products: Products = choose_products()
        draw = torch.Generator().manual_seed(5)

        halves = 2 if activation == "silu" else 1
        self.plain: dict[int, torch.Tensor] = {}  # by the identity of what it is packed into

        def linear(rows: int, columns: int) -> Linear:
            weight = torch.randn((rows, columns), generator=draw)
            packed = Linear(self.products.pack(weight), None)
            self.plain[id(packed)] = weight.double()
            return packed

        self.weights = Experts(
            norm=Norm(torch.ones(HIDDEN), 1e-6),
            router=linear(count, HIDDEN),
            gate_up=tuple(linear(halves * WIDTH, HIDDEN) for _ in range(count)),
            down=tuple(linear(HIDDEN, WIDTH) for _ in range(count)),
            choice=Choice(chosen, renormalised, **further),
            activation=activation,
            shared=SharedExpert(
                linear(halves * SHARED, HIDDEN),
                linear(HIDDEN, SHARED),
                torch.randn(HIDDEN, generator=draw) if share else None,
            )
            if shared
            else None,
        )
        self.bound = BoundExperts.of(self.weights, self.products)

    def part(self, share: Shard) -> Layer:
        """What a rank has of it: a part of each expert's width, and of the shared one's."""
        part, shared, pieces = copy(self), self.weights.shared, 2 if self.weights.activation == "silu" else 1

        def narrow(first: Linear, last: Linear, width: int) -> tuple[Linear, Linear]:
            outputs, inputs = part_of_width(width, share, pieces=pieces)
            plain = self.plain[id(first)].float(), self.plain[id(last)].float()
            taken = plain if outputs is None or inputs is None else (plain[0][outputs], plain[1][:, list(inputs)])
            return Linear(self.products.pack(taken[0]), None), Linear(self.products.pack(taken[1]), None)

        both = zip(self.weights.gate_up, self.weights.down, strict=True)
        gate_up, down = zip(*[narrow(first, last, WIDTH) for first, last in both], strict=True)
        if shared is not None:
            shared = SharedExpert(*narrow(shared.gate_up, shared.down, SHARED), shared.gate)
        part.weights = replace(self.weights, gate_up=gate_up, down=down, shared=shared)
        part.bound = BoundExperts.of(part.weights, self.products)
        return part

    def added(self, residual: NDArray[np.float32], live: NDArray[np.intp] | None = None) -> NDArray[np.float32]:
        """residual: [n, HIDDEN]. Everything that nobody may read is NaN beforehand."""
        return self._computed(residual, live).residual_array[: len(residual)] - 0.0

    def sums(self, residual: NDArray[np.float32], live: NDArray[np.intp] | None = None) -> NDArray[np.float32]:
        """The same before it is added to the residual."""
        return self._computed(residual, live).branch_array[: len(residual)] - 0.0

    def _computed(self, residual: NDArray[np.float32], live: NDArray[np.intp] | None) -> Buffers:
        count = len(residual)
        rows = count + -count % self.products.row_multiple
        buffers = Buffers.make(rows, HIDDEN, self.products)
        weights = self.weights
        shared = 0 if weights.shared is None else weights.shared.width
        own = ExpertBuffers.make(rows, HIDDEN, weights.count, weights.width, shared, weights.activation)
        for field in fields(own):
            getattr(own, field.name).fill_(float("nan"))
        buffers.branch_array[:] = np.nan
        buffers.residual_array[:] = 0.0
        buffers.residual_array[:count] = residual
        buffers.norm.apply(NormWeight.of(self.weights.norm))
        self.bound.write(buffers, own, np.arange(count) if live is None else live)
        buffers.residual_array[:] += buffers.branch_array
        return buffers


def rows_of(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize(("chosen", "renormalised"), [(1, True), (3, False), (COUNT, True)])
def test_a_token_gets_the_sum_of_its_experts_by_their_shares(chosen: int, renormalised: bool) -> None:
    layer, residual = Layer(chosen, renormalised), rows_of(9)
    weights = layer.weights
    x = torch.from_numpy(residual).double()
    normed = x / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-6)
    shares, named = torch.softmax(normed @ layer.plain[id(weights.router)].t(), 1).topk(chosen)
    if renormalised:
        shares /= shares.sum(1, keepdim=True)
    expected = x.clone()
    for token in range(len(x)):
        for share, expert in zip(shares[token], named[token].tolist(), strict=True):
            both = normed[token] @ layer.plain[id(weights.gate_up[expert])].t()
            gated = torch.nn.functional.silu(both[:WIDTH]) * both[WIDTH:]
            expected[token] += share * (gated @ layer.plain[id(weights.down[expert])].t())
    np.testing.assert_allclose(layer.added(residual), expected.numpy(), rtol=2e-5, atol=2e-5)


def test_a_token_s_bits_do_not_hang_on_who_shares_its_experts() -> None:
    layer, residual = Layer(3, renormalised=True), rows_of(33)
    alone = np.concatenate([layer.added(residual[i : i + 1]) for i in range(len(residual))])
    shuffled = np.random.default_rng(1).permutation(len(residual))
    for places in (np.arange(33), np.arange(5), np.arange(33)[::-1], shuffled):
        np.testing.assert_array_equal(layer.added(residual[places]), alone[places])


def test_masked_tokens_are_sent_nowhere_and_nothing_is_added_to_them() -> None:
    layer, residual = Layer(2, renormalised=False), rows_of(6)
    alone = layer.added(residual)
    residual[[1, 4]] = np.nan
    found = layer.added(residual, live=np.array([0, 2, 3, 5]))
    np.testing.assert_array_equal(found[[0, 2, 3, 5]], alone[[0, 2, 3, 5]])
    assert np.isnan(found[[1, 4]]).all()


@pytest.mark.parametrize("share", [False, True])
def test_what_every_token_gets_is_added_behind_its_experts(share: bool) -> None:
    plain, layer = Layer(2, renormalised=True), Layer(2, renormalised=True, shared=True, share=share)
    residual, shared = rows_of(9), layer.weights.shared
    assert shared is not None
    x = torch.from_numpy(residual).double()
    normed = x / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-6)
    both = normed @ layer.plain[id(shared.gate_up)].t()
    expected = (torch.nn.functional.silu(both[:, :SHARED]) * both[:, SHARED:]) @ layer.plain[id(shared.down)].t()
    if shared.gate is not None:
        expected *= torch.sigmoid(normed @ shared.gate.double())[:, None]
    found = layer.added(residual)
    np.testing.assert_allclose(found - plain.added(residual), expected.numpy(), rtol=2e-5, atol=5e-5)
    alone = np.concatenate([layer.added(residual[i : i + 1]) for i in range(len(residual))])
    np.testing.assert_array_equal(found, alone)
    residual[4] = np.nan
    among_masked = layer.added(residual, live=np.array([0, 1, 2, 3, 5, 6, 7, 8]))
    np.testing.assert_array_equal(np.delete(among_masked, 4, 0), np.delete(alone, 4, 0))


@pytest.mark.parametrize("shared", [False, True])
def test_experts_without_gates_square_what_is_above_zero(shared: bool) -> None:
    layer = Layer(3, renormalised=True, shared=shared, activation="squared_relu", scoring="logistic", scale=2.5)
    weights, residual = layer.weights, rows_of(9)
    x = torch.from_numpy(residual).double()
    normed = x / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-6)
    shares, named = torch.sigmoid(normed @ layer.plain[id(weights.router)].t()).topk(3)
    shares *= 2.5 / shares.sum(1, keepdim=True)

    def made(first: Linear, down: Linear, row: torch.Tensor) -> torch.Tensor:
        return (row @ layer.plain[id(first)].t()).relu().square() @ layer.plain[id(down)].t()

    expected = x.clone()
    for token in range(len(x)):
        for share, expert in zip(shares[token], named[token].tolist(), strict=True):
            expected[token] += share * made(weights.gate_up[expert], weights.down[expert], normed[token])
        if weights.shared is not None:
            expected[token] += made(weights.shared.gate_up, weights.shared.down, normed[token])
    found = layer.added(residual)
    np.testing.assert_allclose(found, expected.numpy(), rtol=5e-5, atol=5e-4)
    alone = np.concatenate([layer.added(residual[i : i + 1]) for i in range(len(residual))])
    np.testing.assert_array_equal(found, alone)


def test_where_nobody_lives_no_expert_is_read() -> None:
    layer, residual = Layer(2, renormalised=False), rows_of(4)
    np.testing.assert_array_equal(layer.added(residual, live=np.zeros(0, np.intp)), residual)
