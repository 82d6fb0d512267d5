"""The oracle of the simulator says of an ordinary request what the tests of the chain expect."""

from __future__ import annotations

import pytest

from runahead.runtime.wire.parameters import SamplingParams
from tests.runtime.programs.hash_model import EOS, completion
from tests.simulation.generate import make_script
from tests.simulation.oracle import answer
from tests.simulation.script import Mode


@pytest.mark.parametrize("seed", range(20))
def test_requests_that_ask_for_nothing_are_answered_as_the_hash_model_does(seed: int) -> None:
    script = make_script(seed, Mode.PLAIN)
    for ask in script.asks:
        right = answer(ask, script.world)
        if ask.sampling == SamplingParams(seed=ask.seed) and not (ask.is_sick or right.refusal):
            stops = {*ask.stop_token_ids, *(() if ask.ignore_eos else (EOS,))}
            expected = completion(
                list(ask.prompt),
                ask.seed,
                ask.max_tokens,
                stops=stops,
                min_tokens=ask.min_tokens,
                context_length=script.world.context_length,
            )
            assert list(right.tokens) == expected


def test_the_same_seed_writes_the_same_script_and_another_mode_another() -> None:
    assert make_script(7) == make_script(7)
    assert make_script(7, Mode.PLAIN).asks != make_script(7, Mode.DRAFTS).asks
