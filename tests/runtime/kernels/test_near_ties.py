"""What counts as a near tie: distances to a choice against the sampler itself, and made-up models with ties of both
kinds."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from runahead.cuda_graphs.device import Form
from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.reference import experts
from runahead.runtime.kernels.reference.sampling import sample_rows
from runahead.runtime.wire.parameters import SamplingParams
from tests.parity.upcycled import BUNDLED, upcycled
from tests.runtime.kernels.near_ties import (
    Bounds,
    Difference,
    Gaps,
    Kind,
    Reference,
    first_difference,
    needed,
    router_gap,
)
from tests.runtime.kernels.sampling_oracle import RowSpec, penalties_of, state_of
from tests.runtime.models.checkpoints import CASES, save

VOCAB: Final = 60
POSITION: Final = 17
GREEDY: Final = SamplingParams(temperature=0.0)
DRAWN: Final = SamplingParams(temperature=0.8)
NEAR: Final = Bounds(scores=2**-6, router=2**-6, scores_behind_router=1.0)
PREFIX: Final = (5, 8, 13, 21, 34)
SAMPLINGS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "all filters": {"top_k": 9, "top_p": 0.8, "min_p": 0.05},
}


def sampled(logits: NDArray[np.float64], sampling: SamplingParams) -> int:
    """By the reference."""
    row = RowSpec(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p,
        seed=sampling.seed, position=POSITION,
    )  # fmt: skip
    rows = torch.from_numpy(logits.astype(np.float32))[None]
    state, penalties = state_of([row], logits.size), penalties_of([row], logits.size)
    return int(sample_rows(rows, state, penalties, torch.tensor([0]), Form.FULL, 0).tokens[0])


def logits_of(seed: int) -> NDArray[np.float64]:
    found: NDArray[np.float32] = np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)
    return found.astype(np.float64)


@pytest.mark.parametrize("changes", SAMPLINGS.values(), ids=SAMPLINGS)
def test_what_is_sampled_needs_nothing_and_everything_else_needs_something(changes: dict[str, Any]) -> None:
    for seed in range(20):
        logits, sampling = logits_of(seed), msgspec.structs.replace(DRAWN, seed=seed, **changes)
        token = sampled(logits, sampling)
        distances = [needed(logits, POSITION, other, sampling) for other in range(VOCAB)]
        assert distances.pop(token) < 1e-6
        assert min(distances) > 1e-6


@pytest.mark.parametrize("changes", [SAMPLINGS[name] for name in ("greedy", "drawn", "top-k", "min-p")])
def test_a_token_that_rises_by_what_it_needs_is_sampled_and_by_less_it_is_not(changes: dict[str, Any]) -> None:
    """Where it is the only one that moves, and others are not cut off by that."""
    risen = 0
    for seed in range(20):
        logits, sampling = logits_of(seed), msgspec.structs.replace(DRAWN, seed=seed, **changes)
        token = sampled(logits, sampling)
        for other in np.argsort(-logits)[:4].tolist():
            if other == token:
                continue
            distance = needed(logits, POSITION, other, sampling)
            assert sampled(logits + 0.99 * distance * np.eye(VOCAB)[other], sampling) != other
            risen += sampled(logits + 1.01 * distance * np.eye(VOCAB)[other], sampling) == other
    assert risen > 20


def test_top_p_lets_a_token_in_when_those_ahead_have_fallen_by_what_it_needs() -> None:
    """Of probabilities 0.5, 0.3 and 0.2 a share of 0.7 leaves two; the third comes in when these have less than it."""
    logits = np.log(np.array([0.5, 0.3, 0.2]))
    for seed in range(200):
        sampling = SamplingParams(temperature=1.0, top_p=0.7, seed=seed)
        if sampled(logits, msgspec.structs.replace(sampling, top_p=1.0)) == 2:
            break
    distance = needed(logits, POSITION, 2, sampling)
    assert distance == pytest.approx(min(math.log(0.3 / 0.2), math.log(0.8 / 0.2) - math.log(0.7 / 0.3)), abs=1e-6)
    ahead = np.array([1.0, 1.0, 0.0])
    assert sampled(logits - 0.99 * distance * ahead, sampling) != 2
    assert sampled(logits - 1.01 * distance * ahead, sampling) == 2


def test_a_token_may_win_because_the_one_ahead_of_it_is_cut_off() -> None:
    """Its logit is close to the border of top-k; the noise alone puts it far ahead."""
    logits = np.array([4.0, 1.0, 0.999, -9.0])
    for seed in range(400):
        sampling = SamplingParams(temperature=1.0, top_k=2, seed=seed)
        if sampled(logits, sampling) == 1 and needed(logits, POSITION, 0, SamplingParams(seed=seed)) > 0.1:
            break
    assert needed(logits, POSITION, 0, sampling) == pytest.approx(0.001)
    assert sampled(logits + np.array([0, -0.002, 0, 0]), sampling) != 1


@pytest.mark.parametrize(
    "changes",
    [{"presence_penalty": 0.5}, {"repetition_penalty": 1.2}, {"bias_ids": (3,), "bias_values": (1.0,)}],
)
def test_what_makes_logits_others_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="logits are changed before"):
        needed(logits_of(0), POSITION, 3, msgspec.structs.replace(DRAWN, **changes))


def test_the_first_difference_is_behind_what_both_have() -> None:
    assert first_difference([1, 2], [3, 4, 5], [3, 6, 5]) == Difference((1, 2, 3), (4, 6))
    assert first_difference([1, 2], [3, 4], [3, 4]) is None
    with pytest.raises(ValueError, match="length alone"):
        first_difference([1], [2, 3], [2])


def test_bounds_tell_the_kinds_apart() -> None:
    assert NEAR.kind_of(Gaps(0.01, math.inf)) is Kind.SCORES
    assert NEAR.kind_of(Gaps(0.01, 0.0)) is Kind.SCORES
    assert NEAR.kind_of(Gaps(2**-6, 0.02)) is Kind.NEITHER
    assert NEAR.kind_of(Gaps(0.5, 0.01)) is Kind.ROUTER
    assert NEAR.kind_of(Gaps(1.0, 0.01)) is Kind.NEITHER, "no router explains that"


def test_a_router_s_gap_is_between_the_last_that_is_chosen_and_the_first_that_is_not() -> None:
    scores = np.array([[4.0, 1.0, 2.5, 0.0], [1.0, 2.0, 3.0, 3.25]], np.float32)
    assert router_gap(scores, 2) == pytest.approx(1.0 / scores.std())
    assert router_gap(scores, 1) == pytest.approx(0.25 / scores.std())
    assert router_gap(scores, 4) == math.inf, "there is nothing to choose"


def copied(to: Path, source: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """The checkpoint of a folder in another, with other tensors."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        shutil.copy(source / name, to)
    return to


def test_two_tokens_alike_are_a_near_tie_where_they_are_the_best_and_nowhere_else(tmp_path: Path) -> None:
    plain = Reference(BUNDLED)
    logits, router = plain.after(PREFIX)
    assert router == math.inf and not plain.has_routers
    best, second, *_, worse, worst = np.argsort(-logits)[:100].tolist()

    def make_alike(tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"]  # which is the head, too
        for one, other in ((best, second), (worse, worst)):
            embedding[other] = embedding[one]
            embedding[other, 0] *= 1 - 2**-7

    alike = Reference(copied(tmp_path, BUNDLED, make_alike))
    of_pairs = [alike.gaps(Difference(PREFIX, pair), GREEDY) for pair in ((best, second), (worse, worst))]
    assert [NEAR.kind_of(gaps) for gaps in of_pairs] == [Kind.SCORES, Kind.NEITHER]
    assert of_pairs[0].scores < of_pairs[1].scores / 20, "these are alike, and both are far behind the best"
    assert plain.gaps(Difference(PREFIX, (best, second)), GREEDY).scores == pytest.approx(
        (logits[best] - logits[second]) / logits.std()
    )


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return upcycled(tmp_path_factory.mktemp("mixtral"))


def test_the_smallest_gap_of_all_routers_is_found(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each layer's router scores, as it hands it over."""
    reference, seen, route = Reference(mixtral), [], experts.route

    def watched(scores: NDArray[np.float32], live: NDArray[np.intp], choice: Choice) -> Iterator[experts.Group]:
        seen.append(scores[live])
        return route(scores, live, choice)

    monkeypatch.setattr(experts, "route", watched)
    _, router = reference.after(PREFIX)
    assert [scores.shape for scores in seen] == [(len(PREFIX), 5)] * 6
    assert reference.has_routers and router == min(router_gap(scores, 2) for scores in seen)


def test_a_router_that_is_close_explains_what_scores_do_not(mixtral: Path, tmp_path: Path) -> None:
    """In one layer all experts but the first are almost equally good to every token."""

    def make_close(tensors: dict[str, torch.Tensor]) -> None:
        router = tensors["model.layers.3.block_sparse_moe.gate.weight"]
        router[2:] = router[1]
        router[2:, 0] += 1e-4

    close, apart = Reference(copied(tmp_path, mixtral, make_close)), Reference(mixtral)
    logits, _ = close.after(PREFIX)
    order = np.argsort(-logits)
    behind = (logits[order[0]] - logits[order]) / logits.std()
    other, far = (int(order[np.searchsorted(behind, distance)]) for distance in (0.1, 1.5))
    one = close.gaps(Difference(PREFIX, (int(order[0]), other)), GREEDY)
    assert one.router < 2**-9 and NEAR.kind_of(one) is Kind.ROUTER
    assert NEAR.kind_of(close.gaps(Difference(PREFIX, (int(order[0]), far)), GREEDY)) is Kind.NEITHER
    assert apart.after(PREFIX)[1] > 4 * one.router


def test_routers_that_choose_by_more_than_scores_are_refused(tmp_path: Path) -> None:
    save(next(case for case in CASES if case.name.startswith("glm4")), tmp_path)
    with pytest.raises(ValueError, match="choose by more than their scores"):
        Reference(tmp_path)
