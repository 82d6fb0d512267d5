"""Penalties, prompt log-probabilities and finite flags on the host devices: what apply, S and F do to their memory."""

from __future__ import annotations

import numpy as np

from runahead.runtime.plan import Admission, Chunk
from runahead.runtime.scheduler.new_row import admission_record, penalty_list
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.runtime.programs.host_rows import (
    PENALTY_SLOTS,
    PLAIN,
    RICH,
    admission,
    admit,
    advance,
    chunk_of,
    decoding,
    make_rows,
    plan_of,
    run,
    stopping_rows,
)

# ---------------------------------------------------------------- penalties

PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=-0.5)


def penalised(slot: int, penalty_slot: int, tokens: list[int], sampling: SamplingParams = PENALISED) -> Admission:
    """Twelve of the tokens are the prompt."""
    known = np.array(tokens, np.int32)
    stopping = StoppingParams(max_tokens=10)
    prompt_ids = np.unique(known[:12]) if sampling.repetition_penalty != 1 else known[:0]
    counts = penalty_list(prompt_ids, known[12:])
    record = admission_record(
        slot, sampling, stopping, 12, 22, (1,), penalty_slot=penalty_slot, counts=counts, blocks=(9, 8)
    )
    return Admission(slot, record)


def bits_of(words: np.ndarray) -> list[int]:
    return np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def test_an_admission_fills_its_penalty_slot_with_all_that_is_known_of_the_row() -> None:
    rows = make_rows()
    rows.poison_penalty_slot(1)
    admit(rows, 1, penalised(2, 1, [*range(30, 42), 5, 31, 5]))
    assert rows.penalty_slot[2] == 1
    assert (rows.repetition_penalty[2], rows.presence_penalty[2], rows.frequency_penalty[2]) == (1.5, 0.25, -0.5)
    assert {token: int(rows.counts[1, token]) for token in rows.counts[1].nonzero()[0].tolist()} == {5: 2, 31: 1}
    assert bits_of(rows.in_prompt[1]) == list(range(30, 42))
    assert rows.block_table[2].tolist() == [5, 8, 0, 0], "the cached blocks, then what the plan appends"
    assert not rows.counts[[0, 2]].any()
    assert not rows.in_prompt[[0, 2]].any()


def test_an_admission_without_penalties_leaves_every_penalty_slot_alone() -> None:
    rows = make_rows()
    admit(rows, 1, penalised(2, 1, [*range(30, 42), 5]))
    counts, in_prompt = rows.counts.copy(), rows.in_prompt.copy()
    admit(rows, 2, admission(2, RICH, ()))
    assert rows.penalty_slot[2] == -1
    assert rows.repetition_penalty[2] == 1
    assert np.array_equal(rows.counts, counts)
    assert np.array_equal(rows.in_prompt, in_prompt)


def test_a_token_that_is_kept_is_counted_in_its_row_s_penalty_slot() -> None:
    rows = stopping_rows()
    rows.penalty_slot[0] = 1
    advance(rows, {0: 40, 1: 41})
    advance(rows, {1: 40, 0: 40})
    assert rows.counts[1].nonzero()[0].tolist() == [40]
    assert rows.counts[1, 40] == 2
    assert not rows.counts[[0, PENALTY_SLOTS]].any()


def test_a_token_of_a_row_that_had_ended_or_is_not_finite_is_not_counted() -> None:
    rows = stopping_rows()
    rows.penalty_slot[:2] = (0, 1)
    rows.alive[0] = False
    advance(rows, {0: 40, 1: 41}, finite=(True, False))
    assert not rows.counts.any()


# ---------------------------------------------------------------- prompt log-probabilities and finite flags


def asking(slot: int, prompt_logprobs: int) -> Admission:
    return admission(slot, SamplingParams(temperature=0.0, prompt_logprobs=prompt_logprobs), ())


def test_every_query_token_of_a_prompt_that_asks_has_the_next_one_as_its_target_but_the_last() -> None:
    rows = make_rows()
    decoding(rows, {0: 6})
    first = Chunk(1, 0, np.array([30, 31, 32], np.int32), False, target=33)
    chunks = (first, chunk_of(2, 0, 5), Chunk(3, 0, np.array([40, 41], np.int32), True))
    admissions = (asking(1, 0), admission(2, PLAIN, ()), asking(3, 1))
    run(rows, plan_of(1, [0, 1, 2, 3], chunks=chunks, admissions=admissions))
    queries = rows.queries()
    wanted = rows.prompt_queries(queries)
    assert queries.query_start_loc.tolist() == [0, 1, 4, 9, 11]
    assert wanted.index.tolist() == [1, 2, 3, 9]
    assert wanted.target.tolist() == [31, 32, 33, 41]
    assert wanted.asked.tolist() == [0, 0, 0, 1]


def test_a_row_that_has_ended_leaves_no_prompt_log_probabilities() -> None:
    rows = make_rows()
    run(rows, plan_of(1, [1], chunks=(chunk_of(1, 0, 5),), admissions=(asking(1, 1),)))
    rows.alive[1] = False
    assert rows.prompt_queries(rows.queries()).index.size == 0


def test_a_row_is_finite_if_all_its_query_tokens_are_or_if_it_is_masked() -> None:
    rows = make_rows()
    decoding(rows, {0: 6, 1: 3, 2: 9, 3: 0})
    rows.alive[2] = False
    rows.rings.finite[:] = -1
    run(rows, plan_of(1, [0, 1, 2, 3], chunks=(chunk_of(1, 0, 3), chunk_of(3, 0, 2))))
    rows.write_finite(np.array([True, True, False, True, False, True, True]), rows.queries())
    assert rows.rings.finite[1].tolist() == [1, 0, 1, 1]
    run(rows, plan_of(2, [0, 1, 2]))
    rows.write_finite(np.array([False, True, False]), rows.queries())
    assert rows.rings.finite[2].tolist() == [0, 1, 1, -1]
