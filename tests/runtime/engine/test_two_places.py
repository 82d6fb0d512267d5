"""A launch that runs in two places: nothing is given back, or said too early, before it has ended in both.

The second place has a program and memory of its own, and gets nothing but the bytes of the plans.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from runahead.cuda_graphs.device import NEVER, LaunchShape
from runahead.cuda_graphs.rings import STATUS_FAULT
from runahead.runtime.plan import shape_of
from runahead.runtime.wire.parameters import SamplingParams
from tests.cuda_graphs.simulated_device import SimulatedDevice, seeded_schedule
from tests.runtime.chain import Chain, make_chain
from tests.runtime.programs.hash_model import VOCAB, completion
from tests.runtime.programs.hash_program import HashProgram
from tests.runtime.scheduler.test_prompt_logprobs import described, expected, prompt_of

DEPTHS = [0, 1, 2, 4]
ROWS, BLOCKS, BLOCK = 4, 20, 8


class TwoPlaces(SimulatedDevice):
    """Tokens are the first place's. A launch has ended when it has in both.

    late: looks at which the first had sampled a launch while the second had not ended the one before.
    """

    second: HashProgram
    late = 0

    def begin_second(self, seed: int) -> None:
        """From a seed: how many launches it does whenever the host looks."""
        own = {name: np.zeros_like(getattr(self.rings, name)) for name in ("cells", "finite", "status")}
        self.second = HashProgram(
            replace(self.rings, **own), max_rows=ROWS, num_blocks=BLOCKS, block_size=BLOCK, context_length=128,
            vocab_size=VOCAB,
        )  # fmt: skip
        self._dice = random.Random(seed)
        self._to_do: deque[int] = deque()
        self._second_ended = 0

    def launch(self, shape: LaunchShape) -> None:
        super().launch(shape)
        self._to_do.append(shape.number)

    def ended(self) -> int:
        super().ended()
        for _ in range(self._dice.choice((0, 0, 0, 1, 2))):
            self._do_one()
        return self._least()

    def _least(self) -> int:
        least = min(self._ended, self._second_ended)
        self.late += self._sampled - 1 > least
        return least

    def wait(self, sampled: int, ended: int, wake_fds: Sequence[int], timeout_s: float, in_tail: int = NEVER) -> None:
        """Until both places have come to where a mark moves."""
        self.counters.waits += 1
        while self._queue or self._to_do:
            least = self._least()
            if min(self._sampled, least + 1) > sampled or least > ended or self._tail > in_tail:
                return
            self._run(self._dice.choice((0, 1)))
            if self._dice.random() < 0.1:
                self._do_one()

    def _do_one(self) -> None:
        """A launch, from the bytes of its plan."""
        if not self._to_do:
            return
        number = self._to_do.popleft()
        program, rings = self.second, self.second.rows.rings
        slot = rings.slot(number)
        shape = shape_of(rings.plan[slot])
        assert shape.number == number, "the plan was written over"
        program.sample(shape)
        program.apply(shape)
        program.forward(shape)
        assert not rings.status[slot, STATUS_FAULT], "the plan was another launch's"
        if number <= self._sampled:  # it has not retired, so that what the first left is there
            cells = rings.cells[slot]
            mine = cells >> 32 == number
            assert np.array_equal(cells[mine], self.rings.cells[slot][mine]), "the second place has sampled otherwise"
        self._second_ended = number


def two_places(depth: int, seed: int) -> tuple[Chain, TwoPlaces]:
    chain = make_chain(
        depth, device_type=TwoPlaces, schedule=seeded_schedule(seed), max_rows=ROWS, num_blocks=BLOCKS,
        block_size=BLOCK,
    )  # fmt: skip
    device = chain.device
    assert isinstance(device, TwoPlaces)
    device.begin_second(seed)
    return chain, device


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", DEPTHS)
def test_nothing_is_given_back_before_a_launch_has_ended_in_both_places(depth: int, seed: int) -> None:
    """Staging slots, blocks and row slots: with too few blocks for all, and more requests than rows."""
    chain, device = two_places(depth, seed)
    prompts = {handle: [handle + 2] * (7 * handle) for handle in range(1, 8)}
    for handle, prompt in prompts.items():
        chain.submit(handle, prompt, seed=handle, max_tokens=30, ignore_eos=True)
    while len(chain.engine.registry) or chain.ledger.in_flight or not chain.ledger.launched:
        chain.turn()
        assert chain.ledger.ended <= device._least(), "it has not ended in both places"
    assert chain.tokens() == {handle: completion(prompt, handle, 30, stops=()) for handle, prompt in prompts.items()}
    assert device.late or depth == 0, "the second place was never late: this test shows nothing"


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_a_launch_leaves_of_a_prompt_is_sent_before_tokens_however_late_the_second_place_is(depth: int) -> None:
    asked = {handle: prompt_of(length) for handle, length in ((1, 30), (2, 5), (3, 17))}
    late = 0
    for seed in range(8):
        chain, device = two_places(depth, seed)
        for handle, prompt in asked.items():
            sampling = SamplingParams(prompt_logprobs=2)
            chain.submit(handle, prompt, sampling=sampling, max_tokens=5, ignore_eos=True)
        chain.run()
        for handle, prompt in asked.items():
            assert described(chain, handle, 2) == expected(prompt, 2)
        late += device.late
    assert late or depth == 0, "the second place was never late: this test shows nothing"
