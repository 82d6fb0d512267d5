"""The hash model: what a wrong penalty slot, block table or form does to its answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cuda_graphs.rings import RingLayout, allocate_rings
from cuda_graphs.shape import Form
from runtime.hash_program import HashProgram
from runtime.plan import PLAN_WORDS
from runtime.request import SamplingParams
from tests.runtime.hash_definitions import hash_of, penalty_digest, prompt_logprob, prompt_top
from tests.runtime.launches import Launches, PromptEntry, over_program

VOCAB, BLOCK, ROWS, SLOT = 97, 8, 4, 2
PROMPT = [5, 9, 9, 31, 40, 2, 77, 9, 12, 13, 14]
PENALISED = SamplingParams(seed=77, repetition_penalty=1.2, frequency_penalty=0.5)


def started() -> tuple[HashProgram, Launches]:
    rings = allocate_rings(RingLayout(3, PLAN_WORDS, 1024, ROWS, 3, prompt_tokens=40))
    program = HashProgram(
        rings,
        max_rows=ROWS,
        num_blocks=40,
        block_size=BLOCK,
        context_length=64,
        vocab_size=VOCAB,
        penalty_slots=2,
    )
    return program, Launches(over_program(program), rings, VOCAB, blocks_each=8)


def prefilled(sampling: SamplingParams) -> tuple[HashProgram, Launches]:
    program, launches = started()
    launches.begin(SLOT, PROMPT, sampling, penalty_slot=1)
    launches.launch({SLOT: 100})
    return program, launches


def expected(sampling: SamplingParams, count: int) -> list[int]:
    said: list[int] = []
    for _ in range(count):
        value = hash_of(PROMPT + said) ^ sampling.seed ^ penalty_digest(PROMPT, said, sampling)
        said.append(value % VOCAB)
    return said


@pytest.mark.parametrize(
    "sampling",
    [PENALISED, SamplingParams(seed=7, presence_penalty=1.0), SamplingParams(seed=7)],
    ids=["repetition", "presence", "none"],
)
def test_tokens_follow_from_what_was_said_and_the_factors(sampling: SamplingParams) -> None:
    _, launches = prefilled(sampling)
    assert launches.decode([SLOT], 12)[SLOT] == expected(sampling, 12)


def test_an_evicted_row_goes_on_from_its_full_token_list() -> None:
    tokens = expected(PENALISED, 12)
    _, launches = started()
    launches.begin(1, PROMPT, PENALISED, said=tokens[:5], penalty_slot=0)
    launches.launch({1: 6})
    launches.launch({1: 100})
    assert launches.decode([1], 7)[1] == tokens[5:]


def test_penalties_change_tokens_and_a_plain_launch_forgets_them() -> None:
    _, launches = prefilled(PENALISED)
    free = expected(SamplingParams(seed=77), 4)
    assert expected(PENALISED, 4)[0] != free[0]
    assert launches.decode([SLOT], 4, Form.PLAIN)[SLOT] == free


@pytest.mark.parametrize(
    "spoil",
    [lambda program: program.poison_penalty_slot(1), lambda program: program.rows.counts[1].fill(0)],
    ids=["poisoned", "cleared"],
)
def test_a_penalty_slot_that_is_reused_too_early_changes_the_next_token(spoil: Callable[[HashProgram], None]) -> None:
    program, launches = prefilled(PENALISED)
    launches.decode([SLOT], 3)
    spoil(program)
    assert launches.decode([SLOT], 1)[SLOT] != expected(PENALISED, 4)[3:]


@pytest.mark.parametrize("cut", [1, 4, 8, 10])
def test_prompt_log_probabilities_follow_from_the_cache_whatever_the_chunks(cut: int) -> None:
    _, launches = started()
    launches.begin(SLOT, PROMPT, SamplingParams(prompt_logprobs=2))
    found = launches.launch({SLOT: cut}).prompt[SLOT] + launches.launch({SLOT: 100}).prompt[SLOT]
    assert len(found) == len(PROMPT) - 1
    for index, entry in enumerate(found, start=1):
        (first, highest), (second, next_highest) = prompt_top(PROMPT, index, 2, VOCAB)
        assert entry == PromptEntry(prompt_logprob(PROMPT, index), (first, second), (highest, next_highest))


def test_a_block_that_somebody_else_wrote_changes_the_prompt_log_probabilities() -> None:
    program, launches = started()
    launches.begin(SLOT, PROMPT, SamplingParams(prompt_logprobs=0))
    launches.launch({SLOT: 8})
    program.poison_blocks((int(program.rows.block_table[SLOT, 0]),))
    assert launches.launch({SLOT: 100}).prompt[SLOT][0].logprob != prompt_logprob(PROMPT, 9)


def test_every_row_is_finite_and_nothing_is_said_of_others() -> None:
    _, launches = started()
    launches.rings.finite[:] = -1
    launches.begin(SLOT, PROMPT, PENALISED, penalty_slot=0)
    launches.launch({SLOT: 100})
    assert launches.rings.finite[1].tolist() == [1, -1, -1, -1]
    assert not np.any(launches.rings.finite[[0, 2]] == 1)
