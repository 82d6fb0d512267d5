"""Marks move while the engine looks at them: what it concludes from one look holds together."""

from __future__ import annotations

from itertools import cycle, product

import pytest

from tests.runtime.chain import make_chain
from tests.runtime.programs.hash_model import completion
from tests.runtime.scheduler.test_prompt_logprobs import ask, described, expected, prompt_of

DEPTHS = [1, 2, 4]
PATTERNS = [pattern for pattern in product((0, 1, 2), repeat=3) if any(pattern)]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_mark_that_moves_between_two_looks_brings_no_token_before_the_launch_before_has_retired(depth: int) -> None:
    """A launch leaves a prompt's log-probabilities with its F: they are sent before the token that the next S brings.

    Whatever the device does between any two looks of the host: a pattern says how many steps it takes at each.
    """
    for pattern in PATTERNS:
        steps = cycle(pattern)
        chain = make_chain(depth, schedule=lambda steps=steps: next(steps))  # type: ignore[misc]
        for handle, length in ((1, 30), (2, 5), (3, 17)):
            ask(chain, handle, prompt_of(length))
        chain.run()
        for handle, length in ((1, 30), (2, 5), (3, 17)):
            assert described(chain, handle, 2) == expected(prompt_of(length), 2)
            assert chain.tokens()[handle] == completion(prompt_of(length), 0, 5, stops=())
