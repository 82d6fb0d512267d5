"""Two front ends at one engine: each hears of its own requests and can hurt no others."""

from __future__ import annotations

import numpy as np
import pytest

from runahead.cuda_graphs.device import LaunchShape
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams, StoppingParams
from tests.runtime.chain import make_chain
from tests.runtime.programs.hash_model import completion
from tests.runtime.programs.hash_program import HashProgram

DEPTHS = [0, 1, 2, 4]


@pytest.mark.parametrize("depth", DEPTHS)
def test_outputs_go_to_the_front_end_that_asked_and_to_no_other(depth: int) -> None:
    chain = make_chain(depth)
    handles = {1: (1, 2, 3), 2: (11, 12, 13)}
    for owner, own in handles.items():
        for handle in own:
            chain.submit(handle, [handle + 1] * 5, owner=owner, seed=handle, max_tokens=20, ignore_eos=True)
    chain.run()
    for owner, own in handles.items():
        assert chain.tokens(owner) == {handle: completion([handle + 1] * 5, handle, 20, stops=()) for handle in own}
        assert {handle: len(ends) for handle, ends in chain.finished(owner).items()} == dict.fromkeys(own, 1)
    shared = {output.launch for output in chain.outputs(1)} & {output.launch for output in chain.outputs(2)}
    assert shared, "no launch held rows of both: this test shows nothing"


class SlotAsLogprob(HashProgram):
    """Its log-probabilities say which row slot they are of."""

    def sample(self, shape: LaunchShape) -> None:
        super().sample(shape)
        places, slots = self.rows.to_sample()
        self.rows.rings.logprob[self.rows.rings.slot(shape.number), places, 0] = -slots


def test_log_probabilities_are_those_of_the_rows_of_their_front_end() -> None:
    chain = make_chain(program_type=SlotAsLogprob)
    tokens, stopping = np.array([5, 6], np.int32).tobytes(), StoppingParams(20, ignore_eos=True)
    for handle in range(6):  # every third wants none
        sampling = SamplingParams(logprobs=0 if handle % 3 else -1)
        chain.tell(m.Submit(handle, str(handle), tokens, sampling, stopping), owner=1 + handle % 2)
    chain.turn()
    slots = {handle: chain.slot_of(str(handle)) for handle in range(6)}
    chain.run()
    found: dict[int, set[float]] = {}
    for output in (*chain.outputs(1), *chain.outputs(2)):
        handles = np.frombuffer(output.handles, np.int64)
        for logprobs in output.logprobs:
            found.setdefault(int(handles[logprobs.index]), set()).add(logprobs.chosen)
    assert found == {handle: {-float(slots[handle])} for handle in range(6) if handle % 3}


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_same_handle_of_two_front_ends_is_two_requests(depth: int) -> None:
    chain = make_chain(depth)
    for owner in (1, 2):
        chain.submit(7, [owner + 2] * 5, owner=owner, seed=owner, max_tokens=20, ignore_eos=True)
    chain.run()
    for owner in (1, 2):
        assert chain.tokens(owner)[7] == completion([owner + 2] * 5, owner, 20, stops=())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_cancel_ends_only_the_request_of_the_front_end_that_sent_it(depth: int) -> None:
    chain = make_chain(depth)
    chain.submit(7, [3] * 5, owner=1, max_tokens=30, ignore_eos=True)
    chain.submit(8, [4] * 5, owner=1, max_tokens=30, ignore_eos=True)
    chain.submit(7, [5] * 5, owner=2, max_tokens=30, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens(2).get(7))
    chain.tell(m.Cancel(7), owner=2)
    chain.tell(m.Cancel(8), owner=2)
    chain.run()
    assert {handle: len(tokens) for handle, tokens in chain.tokens(1).items()} == {7: 30, 8: 30}
    assert chain.finished(2) == {}
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_losing_one_front_end_leaves_the_requests_of_the_other(depth: int) -> None:
    chain = make_chain(depth, max_rows=4)
    for handle in range(1, 5):
        for owner in (1, 2):
            chain.submit(handle, [handle + owner] * 5, owner=owner, max_tokens=30, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens(2))
    chain.tell(None, owner=2)
    chain.run()
    assert chain.engine.stats().front_ends_lost == 1
    assert chain.finished(2) == {}
    assert sorted(chain.finished(1)) == [1, 2, 3, 4]
    for handle in range(1, 5):
        assert chain.tokens(1)[handle] == completion([handle + 1] * 5, 0, 30, stops=())
    chain.check_nothing_is_left()


def test_an_abort_reaches_the_stream_of_another_front_end_and_its_answer_goes_to_who_asked() -> None:
    chain = make_chain()
    chain.submit(1, [3, 4], owner=1, max_tokens=50, ignore_eos=True)
    chain.turn()
    chain.tell(m.Abort(5, ("r1",)), owner=2)
    chain.run()
    assert [end.reason for end in chain.finished(1)[1]] == [FinishReason.ABORTED]
    assert [to for to, message in chain.links.sent if isinstance(message, m.AbortResult)] == [2]
    assert chain.outputs(2) == []
