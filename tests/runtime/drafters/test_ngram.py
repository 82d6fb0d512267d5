"""Prompt lookup: what is proposed, against a search written out token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runahead.runtime.drafters.ngram import LONGEST, NO_DRAFT, NgramDrafter

ROWS, CONTEXT = 4, 64
NONE = [NO_DRAFT] * 4


def proposed(tokens: list[int], count: int = 4) -> list[int]:
    drafter = NgramDrafter(ROWS, CONTEXT)
    drafter.read(2, 0, np.array(tokens, np.int32))
    return drafter.propose(np.array([2]), np.array([len(tokens)]), count)[0].tolist()


def written_out(tokens: list[int], count: int) -> list[int]:
    """By the definition, place by place."""
    best: tuple[int, int] | None = None
    for follows in range(1, len(tokens)):
        agreeing = 0
        while agreeing < min(LONGEST, follows) and tokens[follows - 1 - agreeing] == tokens[-1 - agreeing]:
            agreeing += 1
        if agreeing and (best is None or (agreeing, follows) > best):
            best = agreeing, follows
    if best is None:
        return [NO_DRAFT] * count
    line = list(tokens)
    for place in range(best[1], best[1] + min(count, {1: 1, 2: 2, 3: 4, 4: count}[best[0]])):
        line.append(line[place])
    return (line[len(tokens) :] + [NO_DRAFT] * count)[:count]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=CONTEXT), st.integers(1, 7))
def test_what_is_proposed_is_what_the_definition_finds(tokens: list[int], count: int) -> None:
    assert proposed(tokens, count) == written_out(tokens, count)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=ROWS), st.integers(1, 7))
def test_neighbours_change_nothing(rows: list[list[int]], count: int) -> None:
    drafter = NgramDrafter(ROWS, CONTEXT)
    for slot, tokens in enumerate(rows):
        drafter.read(slot, 0, np.array(tokens, np.int32))
    found = drafter.propose(np.arange(len(rows)), np.array([len(tokens) for tokens in rows]), count)
    assert found.tolist() == [written_out(tokens, count) for tokens in rows]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5], NONE),
        ([5, 6], NONE),
        ([5, 6, 7, 8, 6], [7, *NONE[1:]]),
        ([5, 6, 7, 8, 9, 1, 5, 6], [7, 8, *NONE[2:]]),
        ([4, 5, 6, 7, 8, 9, 1, 4, 5, 6], [7, 8, 9, 1]),
        ([5, 6, 7, 0, 5, 6, 8, 1, 5, 6], [8, 1, *NONE[2:]]),
        ([3, 5, 6, 7, 0, 4, 5, 6, 8, 1, 3, 5, 6], [7, 0, 4, 5]),
        ([1, 5, 6, 5, 6, 5, 6], [5, 6, 5, 6]),
        ([7, 7, 7, 7], [7, 7, 7, 7]),
    ],
    ids=[
        "one token",
        "two tokens",
        "one agrees",
        "two agree",
        "three agree",
        "the latest of two places",
        "the one with more before it",
        "a row that repeats itself",
        "one token again and again",
    ],
)
def test_what_followed_before_is_proposed(tokens: list[int], expected: list[int]) -> None:
    assert proposed(tokens) == expected


def test_a_row_is_known_however_its_tokens_came() -> None:
    tokens = [5, 6, 7, 8, 9, 1, 5, 6]
    assert proposed(tokens) != NONE
    pieces = NgramDrafter(ROWS, CONTEXT)
    pieces.read(1, 0, np.array(tokens[:3], np.int32))
    pieces.read(1, 3, np.array(tokens[3:5], np.int32))
    for place in (5, 6):
        pieces.took(np.array([1]), np.array([place]), np.array(tokens[place : place + 1], np.int32))
    pieces.took(np.array([0, 1]), np.array([3, 7]), np.array([8, 6], np.int32))
    assert pieces.propose(np.array([1]), np.array([8]), 4)[0].tolist() == proposed(tokens)


def test_a_row_knows_nothing_of_who_had_its_slot_before() -> None:
    drafter = NgramDrafter(ROWS, CONTEXT)
    drafter.read(0, 0, np.array([5, 6, 7, 8] * 10, np.int32))
    drafter.read(0, 0, np.array([5, 6, 1], np.int32))
    assert drafter.propose(np.array([0]), np.array([3]), 4)[0].tolist() == NONE
    drafter.poison(0)
    drafter.read(0, 0, np.array([5, 6, 7, 5, 6], np.int32))
    assert drafter.propose(np.array([0]), np.array([5]), 4)[0].tolist() == [7, 5, *NONE[2:]]


def test_nothing_is_proposed_to_no_rows() -> None:
    assert NgramDrafter(ROWS, CONTEXT).propose(np.zeros(0, np.int64), np.zeros(0, np.int64), 3).shape == (0, 3)
