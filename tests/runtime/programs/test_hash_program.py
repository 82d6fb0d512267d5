"""The hash model: what a wrong penalty slot, block table or form does to its answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from runahead.cuda_graphs.device import Form
from runahead.cuda_graphs.rings import RingLayout, allocate_rings
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.row_record import token_mask
from runahead.runtime.wire.parameters import SamplingParams
from tests.runtime.launches import Launches, PromptEntry, over_program
from tests.runtime.programs.hash_definitions import hash_of, penalty_digest, prompt_logprob, prompt_top
from tests.runtime.programs.hash_program import HashProgram

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


# ---------------------------------------------------------------- what has a say in a token

ALLOWED = (3, 5, 8, 90)
PLAIN_DRAW = SamplingParams(seed=77)
STEERED = {
    "seed": SamplingParams(seed=78),
    "high half of the seed": SamplingParams(seed=77 + (1 << 40)),
    "temperature": SamplingParams(seed=77, temperature=0.5),
    "top_k": SamplingParams(seed=77, top_k=3),
    "top_p": SamplingParams(seed=77, top_p=0.5),
    "min_p": SamplingParams(seed=77, min_p=0.25),
    "bias": SamplingParams(seed=77, bias_ids=(4,), bias_values=(1.0,)),
    "bias of another value": SamplingParams(seed=77, bias_ids=(4,), bias_values=(2.0,)),
    "bias of another id": SamplingParams(seed=77, bias_ids=(5,), bias_values=(1.0,)),
    "allowed": SamplingParams(seed=77, allowed_mask=token_mask(ALLOWED, VOCAB).tobytes()),
}
IN_EVERY_FORM = ("seed", "high half of the seed", "temperature")


def said(sampling: SamplingParams, form: Form = Form.FULL) -> list[int]:
    return prefilled(sampling)[1].decode([SLOT], 8, form)[SLOT]


def test_whatever_a_request_asks_for_makes_other_tokens() -> None:
    found = {name: tuple(said(sampling)) for name, sampling in STEERED.items()}
    found["none"] = tuple(said(PLAIN_DRAW))
    assert len(set(found.values())) == len(found)
    assert set(found["allowed"]) <= set(ALLOWED)


@pytest.mark.parametrize("name", STEERED)
def test_a_plain_launch_knows_a_temperature_and_a_seed_alone(name: str) -> None:
    assert (said(STEERED[name], Form.PLAIN) == said(PLAIN_DRAW, Form.PLAIN)) == (name not in IN_EVERY_FORM)


def test_a_greedy_row_looks_neither_at_its_seed_nor_at_its_filters() -> None:
    greedy = [SamplingParams(temperature=0.0, seed=seed, top_k=seed, top_p=0.5) for seed in (1, 2)]
    assert said(greedy[0]) == said(greedy[1]) != said(PLAIN_DRAW)


def test_a_row_is_drawn_with_its_own_parameters_beside_others_and_after_them() -> None:
    alone = {slot: said(sampling) for slot, sampling in enumerate(STEERED.values())}
    _, launches = started()
    for first in range(0, len(alone) - ROWS + 1, ROWS):
        for slot in range(ROWS):
            launches.begin(slot, PROMPT, list(STEERED.values())[first + slot])
        launches.launch(dict.fromkeys(range(ROWS), 100))
        found = launches.decode(range(ROWS), 8)
        launches.launch({})
        assert found == {slot: alone[first + slot] for slot in range(ROWS)}


def test_log_probabilities_follow_from_the_tokens_before_and_are_left_for_those_who_ask() -> None:
    _, launches = started()
    asked = {0: -1, 1: 0, 2: 2}
    for slot, count in asked.items():
        launches.begin(slot, PROMPT, SamplingParams(seed=slot, temperature=0.5, logprobs=count))
    launches.launch(dict.fromkeys(asked, 100))
    rings = launches.rings
    rings.logprob[:] = np.nan
    tokens = launches.launch(dict.fromkeys(asked, 1)).tokens
    ring = rings.slot(launches.number)
    assert np.isnan(rings.logprob[ring, 0, 0])
    for slot in (1, 2):
        entry = [*PROMPT, tokens[slot]]
        assert rings.logprob[ring, slot, 0] == prompt_logprob(entry, len(PROMPT))
        top = zip(rings.top_ids[ring, slot, 0, : asked[slot]], rings.top_logprobs[ring, slot, 0], strict=False)
        assert list(top) == prompt_top(entry, len(PROMPT), asked[slot], VOCAB)
