"""Ranks that have a layer's experts between them, on the CPU: all choose among all, and each adds what is its own."""

from __future__ import annotations

from functools import reduce
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.reference.experts import Group, route
from runahead.runtime.kernels.share import WHOLE, Share, ShareError
from tests.runtime.kernels.test_experts import Layer, rows_of

COUNT = 8
LAYERS: Final[dict[str, dict[str, Any]]] = {
    "softmax": {"chosen": 3, "renormalised": True},
    "all": {"chosen": COUNT, "renormalised": False},
    "groups": {
        "chosen": 3, "renormalised": True, "scoring": "logistic", "correction": torch.linspace(-0.2, 0.2, COUNT),
        "groups": 4, "chosen_groups": 2, "scale": 2.5,
    },
    "a shared expert": {"chosen": 2, "renormalised": True, "shared": True, "share": True},
    "no gates": {"chosen": 3, "renormalised": True, "shared": True, "activation": "squared_relu"},
}  # fmt: skip


def ranks(of: int) -> list[Share]:
    return [Share(rank, of) for rank in range(of)]


def drawn_scores(tokens: int, experts: int, seed: int) -> NDArray[np.float32]:
    """Ties among them."""
    return np.random.default_rng(seed).integers(-4, 5, (tokens, experts)).astype(np.float32)


@given(
    of=st.integers(1, 5),
    each=st.integers(1, 4),
    tokens=st.integers(1, 12),
    seed=st.integers(0, 1000),
    renormalised=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_every_group_of_the_whole_is_one_rank_s_with_the_same_tokens_and_shares(
    of: int, each: int, tokens: int, seed: int, renormalised: bool, data: st.DataObject
) -> None:
    scores = drawn_scores(tokens, of * each, seed)
    choice = Choice(data.draw(st.integers(1, of * each)), renormalised)
    live = np.flatnonzero(np.arange(tokens) % 4 != 2)

    def groups(share: Share) -> list[Group]:
        return list(route(scores, live, choice, share))

    whole, parts = groups(WHOLE), [groups(share) for share in ranks(of)]
    for share, part in zip(ranks(of), parts, strict=True):
        assert {group.expert for group in part} <= set(share.part_of(of * each, "experts"))
    found = [group for part in parts for group in part]
    assert [group.expert for group in found] == [group.expert for group in whole]
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.routing_weights, other.routing_weights)


@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_ranks_sums_add_up_to_the_whole_layer_s(kind: str, of: int) -> None:
    layer, residual = Layer(count=COUNT, **LAYERS[kind]), rows_of(19)
    live = np.delete(np.arange(19), [3, 11])
    parts = [layer.part(share).sums(residual, live) for share in ranks(of)]
    assert all(part.any() for part in parts)
    assert not any(part[[3, 11]].any() for part in parts)
    np.testing.assert_allclose(reduce(np.add, parts), layer.sums(residual, live), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("of", [2, 4])
def test_to_the_bit_where_no_rank_but_the_first_that_adds_has_two_terms_of_a_token(of: int) -> None:
    layer, residual = Layer(3, renormalised=True, count=COUNT), rows_of(60)
    whole, parts = layer.sums(residual), [layer.part(share).sums(residual) for share in ranks(of)]
    terms = np.zeros((60, of), int)
    scores = reference_scores(layer, residual)
    for rank, share in enumerate(ranks(of)):
        for group in route(scores, np.arange(60), layer.weights.choice, share):
            terms[group.tokens, rank] += 1
    later = np.cumsum(terms > 0, axis=1) > 1
    alike = np.flatnonzero(((terms <= 1) | ~later).all(axis=1))
    assert 10 < len(alike) < 60
    np.testing.assert_array_equal(reduce(np.add, parts)[alike], whole[alike])


def reference_scores(layer: Layer, residual: NDArray[np.float32]) -> NDArray[np.float32]:
    x = torch.from_numpy(residual).double()
    normed = x / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-6)
    found: NDArray[np.float32] = (normed @ layer.plain[id(layer.weights.router)].t()).float().numpy()
    return found


def test_a_rank_whose_experts_nobody_has_chosen_adds_nothing_and_reads_none() -> None:
    layer, residual = Layer(1, renormalised=True, count=COUNT), rows_of(1)
    sums = [layer.part(share).sums(residual) for share in ranks(COUNT)]
    assert sum(part.any() for part in sums) == 1
    np.testing.assert_array_equal(reduce(np.add, sums), layer.sums(residual))


def test_a_score_that_is_no_number_reaches_the_sum_of_all_ranks() -> None:
    layer, residual = Layer(2, renormalised=True, count=COUNT), rows_of(5)
    residual[3] = np.nan
    found = reduce(np.add, [layer.part(share).sums(residual) for share in ranks(4)])
    assert np.isnan(found[3]).all()
    assert np.isfinite(found[[0, 1, 2, 4]]).all()


def test_a_whole_share_is_the_layer_to_the_bit() -> None:
    layer, residual = Layer(3, renormalised=True, shared=True, count=COUNT), rows_of(9)
    np.testing.assert_array_equal(layer.part(WHOLE).added(residual), layer.added(residual))


def test_experts_are_counted_with_those_of_other_ranks_and_idle_ones_are_a_rank_s_part() -> None:
    layer = Layer(2, renormalised=True, count=COUNT).weights
    part = Layer(2, renormalised=True, count=COUNT).part(Share(1, 4)).weights
    assert (part.count, len(part.gate_up), part.chosen) == (COUNT, 2, 2)
    assert 4 * part.idle == layer.idle > 0


def test_ranks_that_do_not_divide_experts_are_refused_by_a_sentence() -> None:
    with pytest.raises(ShareError, match=r"3 ranks can't have equal parts of 8 experts; .* must divide 8"):
        list(route(drawn_scores(2, COUNT, 0), np.arange(2), Choice(1, True), Share(1, 3)))


@pytest.mark.parametrize(("rank", "of"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none_is_refused(rank: int, of: int) -> None:
    with pytest.raises(ShareError, match=f"there is no rank {rank} of {of}"):
        Share(rank, of)
