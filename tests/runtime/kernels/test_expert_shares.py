"""Ranks that divide the width of each expert, on the CPU: all choose the same experts, and each adds partial sums."""

from __future__ import annotations

from functools import reduce
from typing import Any, Final

import numpy as np
import pytest
import torch

from runahead.runtime.kernels.ranks import WHOLE, Shard, ShardError
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


def ranks(of: int) -> list[Shard]:
    return [Shard(rank, of) for rank in range(of)]


@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_ranks_sums_add_up_to_the_whole_layer_s(kind: str, of: int) -> None:
    layer, residual = Layer(count=COUNT, **LAYERS[kind]), rows_of(19)
    live = np.delete(np.arange(19), [3, 11])
    parts = [layer.part(shard).sums(residual, live) for shard in ranks(of)]
    assert all(part.any() for part in parts)
    assert not any(part[[3, 11]].any() for part in parts)
    np.testing.assert_allclose(reduce(np.add, parts), layer.sums(residual, live), rtol=1e-5, atol=1e-4)


def test_a_score_that_is_no_number_reaches_the_sum_of_all_ranks() -> None:
    layer, residual = Layer(2, renormalised=True, count=COUNT), rows_of(5)
    residual[3] = np.nan
    found = reduce(np.add, [layer.part(shard).sums(residual) for shard in ranks(4)])
    assert np.isnan(found[3]).all()
    assert np.isfinite(found[[0, 1, 2, 4]]).all()


def test_a_whole_share_is_the_layer_to_the_bit() -> None:
    layer, residual = Layer(3, renormalised=True, shared=True, count=COUNT), rows_of(9)
    np.testing.assert_array_equal(layer.part(WHOLE).added(residual), layer.added(residual))


def test_a_rank_has_all_experts_and_its_part_of_what_a_token_leaves_idle() -> None:
    layer = Layer(2, renormalised=True, count=COUNT)
    part = layer.part(Shard(1, 4)).weights
    assert (part.count, part.chosen, 4 * part.width) == (COUNT, 2, layer.weights.width)
    assert 4 * part.idle == layer.weights.idle > 0


@pytest.mark.parametrize(("rank", "of"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none_is_refused(rank: int, of: int) -> None:
    with pytest.raises(ShardError, match=f"there is no rank {rank} of {of}"):
        Shard(rank, of)
