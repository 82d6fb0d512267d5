"""How tokens are drawn and described, in scripts of two requests: as each asked, at every depth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.script import DEPTHS, DRAFTS, Mode
from tests.simulation.small import ask, counts_of

ASKED: dict[str, dict[str, Any]] = {
    "greedily": {"temperature": 0.0},
    "at a temperature": {"temperature": 0.75},
    "with filters": {"top_k": 5, "top_p": 0.875, "min_p": 0.0625},
    "with a bias": {"bias": ((4, -100.0), (9, 0.5))},
    "from allowed tokens": {"allowed": (3, 5, 8, 90)},
    "with a minimum length": {"min_tokens": 18, "stop_token_ids": tuple(range(0, 90, 3))},
    "with log-probabilities": {"logprobs": 2},
}


@pytest.mark.parametrize("how", ASKED)
def test_a_request_is_answered_as_it_asked_beside_one_that_asked_for_nothing(how: str) -> None:
    counts = counts_of((ask(0), replace(ask(1), **ASKED[how])))
    assert counts[f"drawn {how}"] >= 18 * (1 + len(DEPTHS))


def test_each_token_of_a_run_has_the_log_probabilities_of_its_own() -> None:
    """Of a launch that brings several tokens of a row, beside one that asked for none and one that asked for fewer."""
    asks = (ask(0), replace(ask(1), logprobs=3), replace(ask(2), logprobs=0))
    counts = counts_of(asks, mode=Mode.DRAFTS, max_rows=3, num_blocks=50)
    assert counts["drawn with log-probabilities"] >= 2 * 18 * (1 + len(DEPTHS))
    assert sum(counts[f"run of {length}"] for length in range(2, 2 + DRAFTS)), "no launch brought several tokens"


def test_a_minimum_length_gives_way_where_every_allowed_token_would_stop() -> None:
    choosy = replace(ask(0), allowed=(40, 7), stop_token_ids=(7, 40), min_tokens=5)
    counts = counts_of((choosy,))
    assert counts["drawn from allowed tokens"] == 6 * (1 + len(DEPTHS)), "five that may not stop it, and one that does"
    assert counts["finished: STOP"] == 1 + len(DEPTHS)
