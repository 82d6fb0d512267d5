"""A launch is planned late, in the tail of the launch `run_ahead` before, so that the plan includes late arrivals."""

from __future__ import annotations

from functools import partial

import pytest

from tests.cuda_graphs.simulated_device import AFTER_F, WITH_S, SimulatedDevice
from tests.runtime.chain import make_chain, no_step
from tests.runtime.programs.hash_model import completion


@pytest.mark.parametrize(("place", "launches_later"), [(AFTER_F, 1), (WITH_S, 2)])
def test_a_request_that_arrives_before_the_tail_is_in_the_next_launch(place: int, launches_later: int) -> None:
    """A plan that is made as soon as a launch has been sampled misses the request."""
    device_type = partial(SimulatedDevice, tails=lambda: place)
    chain = make_chain(1, device_type=device_type, schedule=no_step)  # type: ignore[arg-type]
    chain.submit(1, [3, 4], max_tokens=40, ignore_eos=True)
    chain.turn_until(lambda: len(chain.tokens().get(1, ())) == 3)
    running = chain.ledger.committed
    assert chain.ledger.launched == running
    chain.turn()  # a mark comes: the tail of this launch, or the tokens of the next one
    chain.submit(2, [5, 6, 7], max_tokens=2, ignore_eos=True)

    def with_prompt() -> list[int]:
        return [launch.number for launch in chain.ledger.launches() if launch.prompt_tokens]

    chain.turn_until(with_prompt)
    assert with_prompt() == [running + launches_later]
    chain.run()
    assert chain.tokens()[2] == completion([5, 6, 7], 0, 2, stops=())
