"""Experts' kernels by themselves: who is sent where, what a token gets, and that nobody else matters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.choice import Choice  # noqa: E402
from runahead.runtime.kernels.forward_batch import ForwardBatch  # noqa: E402
from runahead.runtime.kernels.triton.moe import routing  # noqa: E402
from runahead.runtime.kernels.triton.moe.layer import live_tokens  # noqa: E402
from runahead.runtime.kernels.triton.moe.routing import Routing, route  # noqa: E402
from tests.runtime.kernels.expert_cases import (  # noqa: E402
    CLOSE,
    HALF,
    Case,
    by_the_reference,
    drawn,
    scores_for,
)
from tests.runtime.kernels.matrix_units import multiply_as_matrix_units  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]


def routed(
    scores: torch.Tensor,
    live: torch.Tensor,
    chosen: int,
    renormalised: bool = True,
    *,
    together: bool = False,
    **further: Any,
) -> Routing:
    arrived, choice = torch.zeros(1, dtype=torch.int32, device=DEVICE), Choice(chosen, renormalised, **further)
    found = route_by(together, scores.to(DEVICE), live.int().to(DEVICE), choice, arrived)
    assert int(arrived) == 0
    return found


def route_by(together: bool, *given: Any, **further: Any) -> Routing:
    """Route tokens. together: by one program for all of them, if they are few."""
    with pytest.MonkeyPatch.context() as patch:
        if not together:
            patch.setattr(routing, "_TOGETHER", 0)
        return route(*given, **further)


def entries_by_expert(found: Routing) -> dict[int, list[int]]:
    """What the items say, which must be by ascending expert, and in order."""
    listed: dict[int, list[int]] = {}
    items = found.items.cpu().tolist()
    some = [item for item in items if item[2]]
    assert items[: len(some)] == some, "an item of nothing before one of something"
    assert [item[0] for item in some] == sorted(item[0] for item in some)
    for expert, first, count, _ in some:
        assert 0 < count <= found.block
        assert first == len(listed.setdefault(expert, []))
        listed[expert] += found.entries[expert, first : first + count].tolist()
    return listed


CASES = [  # tokens, experts, chosen, kind
    (1, 8, 2, "random"),
    (5, 12, 3, "ties"),
    (5, 11, 3, "ties"),
    (9, 4, 4, "random"),
    (13, 60, 4, "ties"),
    (16, 128, 8, "ties"),
    (64, 11, 2, "random"),
    (64, 5, 1, "all choose one"),
    (70, 11, 3, "all choose one"),
    (300, 7, 2, "ties"),
    (17, 300, 10, "ties"),  # more experts than tokens
]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "chosen", "kind"), CASES)
def test_tokens_are_listed_by_expert_and_those_that_do_not_live_nowhere(
    tokens: int, experts: int, chosen: int, kind: str, together: bool
) -> None:
    scores, live = scores_for(kind, tokens, experts), torch.arange(tokens) % 3 != 1
    order = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :chosen].sort(1).values
    expected: dict[int, list[int]] = {}
    for token in range(tokens):
        for place, expert in enumerate(order[token].tolist()):
            if live[token]:
                expected.setdefault(expert, []).append(token * chosen + place)
    found = routed(scores, live, chosen, together=together)
    assert entries_by_expert(found) == expected
    shares = torch.softmax(scores.double(), 1).gather(1, order)
    shares /= shares.sum(1, keepdim=True)
    mine = found.routing_weights.view(tokens, chosen).cpu()[live]
    torch.testing.assert_close(mine.double(), shares[live], rtol=1e-5, atol=1e-7)


def test_more_tokens_than_a_program_lists_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_LISTED", 16)
    test_tokens_are_listed_by_expert_and_those_that_do_not_live_nowhere(70, 11, 3, "all choose one", together=False)


def test_as_many_items_whatever_tokens_choose() -> None:
    sizes = {
        len(routed(scores_for(kind, 40, 11), torch.full((40,), alive), 3).items)
        for kind in ("random", "all choose one")
        for alive in (True, False)
    }
    assert len(sizes) == 1


@pytest.mark.parametrize(("tokens", "together"), [(6, True), (6, False), (80, False)])
def test_where_nobody_lives_every_item_is_nothing(tokens: int, together: bool) -> None:
    found = routed(drawn(tokens, 8), torch.zeros(tokens), 2, together=together)
    assert entries_by_expert(found) == {}


@pytest.mark.parametrize("together", [True, False])
def test_shares_that_are_not_renormalised_are_parts_of_all(together: bool) -> None:
    scores = drawn(4, 8)
    found = routed(scores, torch.ones(4), 2, renormalised=False, together=together)
    expected = torch.softmax(scores.double(), 1).topk(2).values.sum(1)
    torch.testing.assert_close(found.routing_weights.view(4, 2).cpu().double().sum(1), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("together", [True, False])
def test_a_score_that_is_no_number_is_in_all_of_its_token_s_shares_and_in_no_other_s(together: bool) -> None:
    scores = drawn(3, 8)
    scores[1, 4] = torch.nan
    found = routed(scores, torch.ones(3), 2, together=together)
    shares = found.routing_weights.view(3, 2).cpu()
    assert shares[1].isnan().all()
    assert shares[[0, 2]].isfinite().all()
    assert sum(map(len, entries_by_expert(found).values())) == 6


def correction_of(experts: int) -> torch.Tensor:
    return drawn(experts, seed=9).to(DEVICE)


# Experts and how they are chosen: each part by itself, and all of them. Groups of which no size is a power of two.
CHOICES: Final[dict[str, tuple[int, Choice]]] = {
    "logistic": (11, Choice(3, False, "logistic")),
    "renormalised and scaled": (40, Choice(3, True, "logistic", scale=2.5)),
    "softmax, scaled": (11, Choice(3, True, scale=1.5)),
    "corrected": (40, Choice(4, True, "logistic", correction_of(40))),
    "corrected below zero": (11, Choice(3, True, "logistic", correction_of(11) - 10.0)),
    "softmax, corrected": (11, Choice(3, False, correction=correction_of(11))),
    "groups": (12, Choice(3, False, "logistic", groups=4, chosen_groups=2)),
    "softmax, groups": (10, Choice(3, True, groups=2, chosen_groups=1)),
    "all": (35, Choice(4, True, "logistic", correction_of(35), groups=5, chosen_groups=3, scale=2.5)),
}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("kind", ["random", "ties"])
@pytest.mark.parametrize(("experts", "choice"), CHOICES.values(), ids=CHOICES)
def test_each_kind_of_choice_is_that_of_the_reference(experts: int, choice: Choice, kind: str, together: bool) -> None:
    if kind == "ties" and choice.correction is not None:
        choice = replace(choice, correction=choice.correction.round())
    scores, arrived = scores_for(kind, 9, experts), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    live = torch.arange(9, device=DEVICE) % 4 != 2
    beside = -experts % 4  # scores by fours, some of which are no expert's
    scores = torch.cat((scores, torch.full((9, beside), 9.0)), 1)
    found = route_by(together, scores.to(DEVICE), live.int(), choice, arrived, beside=beside)
    scores = scores[:, :experts]
    named, shares = by_the_reference(scores, choice)
    expected: dict[int, list[int]] = {}
    for token in live.nonzero()[:, 0].tolist():
        for place, expert in enumerate(named[token].tolist()):
            expected.setdefault(expert, []).append(token * choice.chosen + place)
    assert entries_by_expert(found) == expected
    mine = live.cpu()
    torch.testing.assert_close(found.routing_weights.view(9, -1).cpu()[mine], shares[mine], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("experts", "choice"), CHOICES.values(), ids=CHOICES)
def test_a_lone_row_is_chosen_for_in_the_same_way(experts: int, choice: Choice) -> None:
    case = Case.of(1, experts, choice, "random", torch.float32, hidden=16, width=8)
    assert relative_error(case.added_to_a_lone_row(), case.expected_of_a_lone_row()) < 1e-5


def test_by_the_logistic_function_too_one_score_that_is_no_number_is_in_all_shares() -> None:
    scores, choice = drawn(3, 12), CHOICES["groups"][1]
    scores[1, 4] = torch.nan
    found = routed(scores, torch.ones(3), 3, scoring="logistic", groups=choice.groups, chosen_groups=1)
    shares = found.routing_weights.view(3, 3).cpu()
    assert shares[1].isnan().all()
    assert shares[[0, 2]].isfinite().all()
    assert sum(map(len, entries_by_expert(found).values())) == 9


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize(("tokens", "experts", "chosen", "kind"), [case for case in CASES if case[3] != "ties"])
def test_a_token_gets_the_sum_of_its_experts_by_their_shares(
    tokens: int, experts: int, chosen: int, kind: str, dtype: torch.dtype
) -> None:
    case = Case.of(tokens, experts, chosen, kind, dtype)
    found = case.made()
    assert found[case.live.cpu() == 0].eq(0).all()
    assert relative_error(found, case.expected()) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_experts_without_gates_square_what_is_above_zero(dtype: torch.dtype) -> None:
    """Of several tokens and of a lone one, at sizes that no tile divides."""
    case = Case.of(13, 5, 2, "random", dtype, hidden=40, width=24, activation="squared_relu")
    assert relative_error(case.made(), case.expected()) < CLOSE[dtype]
    lone = case.some([3])
    assert relative_error(lone.added_to_a_lone_row(), lone.expected_of_a_lone_row()) < CLOSE[dtype]


def test_sizes_that_no_tile_divides() -> None:
    case = Case.of(13, 5, 2, "random", torch.float32, hidden=40, width=24)
    assert relative_error(case.made(), case.expected()) < 1e-5


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_a_token_s_bits_do_not_hang_on_who_shares_its_experts(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on how many of them an item holds."""
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    case = Case.of(90, 5, 3, "random", dtype)
    whole = case.made()
    shuffled = torch.randperm(90, generator=torch.Generator().manual_seed(1)).tolist()
    for tokens in (shuffled, list(range(40)), [7], [89, 7, 1, 2]):
        assert torch.equal(case.some(tokens).made(), whole[tokens])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, of what is no number
def test_a_masked_token_that_holds_nonsense_reaches_nobody() -> None:
    case = Case.of(20, 5, 2, "random", HALF)
    sound = case.made()
    dead = case.live == 0
    case.x[dead] = torch.nan
    case.scores[dead] = torch.nan
    assert torch.equal(case.made(), sound)


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize(("experts", "chosen", "hidden", "width"), [(11, 3, 64, 96), (3, 3, 40, 24), (5, 1, 2080, 16)])
def test_a_lone_row_gets_its_sum(experts: int, chosen: int, hidden: int, width: int, dtype: torch.dtype) -> None:
    case = Case.of(1, experts, chosen, "random", dtype, hidden, width)
    assert relative_error(case.added_to_a_lone_row(), case.expected_of_a_lone_row()) < CLOSE[dtype]


def test_a_masked_lone_row_reads_no_expert() -> None:
    case = Case.of(1, 5, 2, "random", HALF)
    for linear in (*case.packed.weights.gate_up, *case.packed.weights.down):
        linear.weight.fill_(torch.nan)
    masked = replace(case, live=torch.zeros_like(case.live))
    assert torch.equal(masked.added_to_a_lone_row(), case.x.cpu())


def test_an_expert_that_nobody_has_named_is_not_read() -> None:
    case = Case.of(6, 11, 2, "random", HALF)
    sound = case.made()
    named = {expert for row in case.scores[case.live > 0].topk(2).indices.tolist() for expert in row}
    others = [expert for expert in range(11) if expert not in named]
    assert others, "as if every expert had been named"
    for expert in others:
        for linear in (case.packed.weights.gate_up[expert], case.packed.weights.down[expert]):
            linear.weight.fill_(torch.nan)
    assert torch.equal(case.made(), sound)


def test_tokens_of_masked_rows_and_padding_do_not_live() -> None:
    starts = torch.tensor([0, 1, 4, 4, 5, 7], dtype=torch.int32, device=DEVICE)
    batch = ForwardBatch(
        token_ids=torch.zeros(9, dtype=torch.int64, device=DEVICE),
        positions=torch.zeros(9, dtype=torch.int64, device=DEVICE),
        slot_mapping=torch.zeros(9, dtype=torch.int64, device=DEVICE),
        query_start_loc=starts,
        seq_lens=torch.tensor([5, 0, 3, 9, 2], dtype=torch.int32, device=DEVICE),
        block_tables=torch.zeros((5, 1), dtype=torch.int32, device=DEVICE),
        num_tokens=9,
        num_rows=5,
        max_seq_len=9,
        is_decode=False,
    )
    assert (live_tokens(batch) > 0).nonzero()[:, 0].tolist() == [0, 4, 5, 6]
