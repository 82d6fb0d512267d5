"""A block is not found where a token of it is void, was never forwarded, or came of something that was not finite."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from runahead.cuda_graphs.device import LaunchShape
from runahead.cuda_graphs.rings import NON_FINITE, STOPPED
from runahead.runtime.programs.cpu.inputs import Queries
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.pressure import whole
from tests.runtime.programs.hash_program import HashProgram

DEPTHS = [0, 1, 2, 4]
PROMPT = [(7 * i) % 90 + 2 for i in range(40)]  # five blocks of 8


def ask(chain: Chain, handle: int, prompt: list[int], count: int = 5) -> None:
    chain.submit(handle, prompt, max_tokens=count, ignore_eos=True)


def cached(chain: Chain, handle: int) -> int:
    """Tokens that a request took from the cache."""
    return chain.finished()[handle][0].cached_tokens


@pytest.mark.parametrize("depth", [2, 4])
def test_a_block_whose_tokens_were_void_before_they_were_committed_is_not_found(depth: int) -> None:
    """Launch 4 fills the second block with the token of position 15, which the host has not seen at the abort."""
    chain = make_chain(depth, schedule=no_step)
    ask(chain, 1, PROMPT[:13], 20)
    chain.turn_until(lambda: chain.ledger.launched == 4)
    assert 13 + len(chain.tokens().get(1, [])) < 16
    chain.tell(m.Abort(1, ("r1",)))
    chain.run()
    assert chain.engine.stats().void_rows > 0
    assert chain.engine.scheduler.pool.findable == 1, "the first block, of the prompt alone"


class SickProgram(HashProgram):
    """Leaves no finite hidden states where a prompt has the token SICK."""

    SICK = 96

    def finite_tokens(self, queries: Queries) -> NDArray[np.bool_]:
        return np.asarray(queries.token_ids != self.SICK)


class SickLogits(HashProgram):
    """Finds the logits of the row with seed 666 not finite, once it knows 20 tokens."""

    def sample(self, shape: LaunchShape) -> None:
        super().sample(shape)
        places, slots = self.rows.to_sample()
        sick = (self.rows.seed[slots] == 666) & (self.rows.seq_len[slots] > 20)
        for place, slot in zip(places[sick].tolist(), slots[sick].tolist(), strict=True):
            cells = self.rings_cells()
            cells[place, 0] |= STOPPED | NON_FINITE
            self.rows.alive[slot] = False

    def rings_cells(self) -> NDArray[np.int64]:
        rings = self.rows.rings
        return rings.cells[rings.slot(self.rows.number)]


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_block_of_a_chunk_that_was_not_finite_nor_any_after_it_is_found(depth: int) -> None:
    sick = PROMPT.copy()
    sick[20] = SickProgram.SICK  # in the second chunk
    chain = make_chain(depth, schedule=no_step, program_type=SickProgram)
    ask(chain, 1, sick)
    ask(chain, 2, PROMPT)
    chain.run()
    ask(chain, 3, sick)
    ask(chain, 4, PROMPT)
    chain.run()
    assert cached(chain, 3) <= 16, "the first chunk was finite"
    assert cached(chain, 4) == 32
    assert chain.tokens()[2] == chain.tokens()[4] == whole(PROMPT, 5)
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_block_of_a_row_whose_logits_were_not_finite_is_found(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, program_type=SickLogits)
    chain.submit(1, PROMPT[:17], seed=666, max_tokens=20, ignore_eos=True)
    chain.run()
    assert [end.reason for end in chain.finished()[1]] == [FinishReason.NON_FINITE]
    assert chain.engine.scheduler.pool.findable == 0
    ask(chain, 2, PROMPT[:17])
    chain.run()
    assert cached(chain, 2) == 0
    assert chain.tokens()[2] == whole(PROMPT[:17], 5)
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_prefix_that_was_found_stays_findable_when_a_row_that_shares_it_is_not_finite(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, program_type=SickLogits)
    ask(chain, 1, PROMPT[:17])
    chain.run()
    findable = chain.engine.scheduler.pool.findable
    chain.submit(2, PROMPT[:17], seed=666, max_tokens=20, ignore_eos=True)
    chain.run()
    assert [end.reason for end in chain.finished()[2]] == [FinishReason.NON_FINITE]
    assert cached(chain, 2) == 16
    assert chain.engine.scheduler.pool.findable == findable
    ask(chain, 3, PROMPT[:17])
    chain.run()
    assert cached(chain, 3) == 16
    chain.check_nothing_is_left()


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_block_of_a_row_whose_logits_were_not_finite_while_it_left_is_found(depth: int) -> None:
    """It has given its blocks up; some of them may be cached already, and nobody's."""
    chain = make_chain(depth, schedule=no_step, program_type=SickLogits)
    chain.submit(1, PROMPT[:17], seed=666, max_tokens=20, ignore_eos=True)
    chain.turn_until(lambda: chain.engine.scheduler.rows.least_len[0] == 20)  # the next token is not finite
    assert len(chain.tokens().get(1, [])) < 4
    chain.engine.scheduler.evict(chain.engine.scheduler.holdings.request(0))
    chain.run()
    assert [end.reason for end in chain.finished()[1]] == [FinishReason.NON_FINITE]
    assert "readmitted" not in chain.engine.stats().events, "it ended while it left"
    assert chain.engine.scheduler.pool.findable == 0
    chain.check_nothing_is_left()


@pytest.mark.parametrize("ends", ["with the last token of a block", "with the first token of a block"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_block_whose_last_token_ended_the_sequence_is_not_found(depth: int, ends: str) -> None:
    """Nobody has forwarded that token: its place in the block holds nothing."""
    length = 4 if ends == "with the last token of a block" else 5
    prompt = prompt_with_new_tokens(length, 12)
    answer = whole(prompt, 12)
    chain = make_chain(depth, schedule=no_step)
    chain.submit(1, prompt, max_tokens=40, ignore_eos=True, stop_token_ids=(answer[11],))
    chain.run()
    assert chain.tokens()[1] == answer
    longer = [*prompt, *answer, *range(2, 20)]
    ask(chain, 2, longer)
    chain.run()
    assert cached(chain, 2) == (8 if length == 4 else 16)
    assert chain.tokens()[2] == whole(longer, 5)


def prompt_with_new_tokens(length: int, count: int) -> list[int]:
    """A prompt whose answer's last token is not among those before it."""
    for first in range(2, 60):
        answer = whole([first] * length, count)
        if answer[-1] not in answer[:-1]:
            return [first] * length
    raise AssertionError("the hash model has no such prompt")


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_prompt_that_is_not_finite_fails_a_request_for_its_log_probabilities(depth: int) -> None:
    sick = PROMPT.copy()
    sick[20] = SickProgram.SICK  # in the second chunk
    chain = make_chain(depth, schedule=no_step, program_type=SickProgram)
    chain.submit(1, sick, sampling=SamplingParams(prompt_logprobs=2), max_tokens=5, ignore_eos=True)
    chain.run()
    assert [end.reason for end in chain.finished()[1]] == [FinishReason.NON_FINITE]
    assert 1 not in chain.tokens()
    (said,) = [message for _, message in chain.links.sent if isinstance(message, m.PromptLogprobs)]
    assert (said.offset, len(said.chosen)) == (1, 4 * 16), "what the first chunk left, and no more"
    assert chain.engine.scheduler.pool.findable == 0
    chain.check_nothing_is_left()
