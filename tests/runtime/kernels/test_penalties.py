"""Repetition, presence and frequency penalties against their definition, and against transformers where it has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from runahead.cuda_graphs.device import Form
from runahead.runtime.kernels.reference.penalties import penalize
from runahead.runtime.kernels.reference.sampling import Sampled, sample_rows
from runahead.runtime.row_record import COUNT_SEEN, COUNT_TOKEN, PROMPT_BIT, token_mask
from runahead.runtime.scheduler.new_row import needs_full, penalty_list
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.runtime.kernels.sampling_oracle import RowSpec, penalized, penalties_of, state_of

VOCAB = 70


def logits_of(seed: int, vocab_size: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=vocab_size) * 4).astype(np.float32)


def applied(logits: np.ndarray, spec: RowSpec) -> np.ndarray:
    """The logits after the reference's penalties."""
    counts = np.bincount(np.array(spec.said, np.int64), minlength=len(logits)).astype(np.int32)
    changed = logits.copy()
    factors = (np.float32(value) for value in (spec.repetition, spec.presence, spec.frequency))
    penalize(changed, counts, token_mask(spec.prompt, len(logits)), *factors)
    return changed


@pytest.mark.parametrize("seed", range(40))
def test_every_combination_has_the_bits_of_the_definition(seed: int) -> None:
    random = np.random.default_rng(seed)
    spec = RowSpec(
        repetition=float(random.choice([1.0, 0.5, 1.1, 1.7])),
        presence=float(random.choice([0.0, 0.9, -2.0])),
        frequency=float(random.choice([0.0, 0.3, -1.1])),
        prompt=tuple(random.integers(0, VOCAB, 12).tolist()),
        said=tuple(random.integers(0, VOCAB, int(random.integers(0, 60))).tolist()),
    )
    logits = logits_of(seed)
    logits[:3] = (0.0, -0.0, 1e-30)
    expected = np.array(penalized(logits.tolist(), spec), np.float32)
    assert np.array_equal(applied(logits, spec), expected)


@pytest.mark.parametrize("penalty", [0.6, 1.3])
def test_repetition_is_that_of_transformers(penalty: float) -> None:
    prompt, said = (3, 9, 9, 41), (9, 12, 12, 12)
    logits = logits_of(1)
    known = torch.tensor([[*prompt, *said]])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(known, torch.from_numpy(logits)[None].clone())[0]
    found = applied(logits, RowSpec(repetition=penalty, prompt=prompt, said=said))
    assert np.array_equal(found, expected.numpy())
    assert np.count_nonzero(found != logits) == 4


def test_presence_and_frequency_look_at_the_completion_alone() -> None:
    logits = logits_of(2)
    spec = RowSpec(presence=1.0, frequency=0.5, prompt=(5, 6, 7), said=(7, 8, 8))
    found = applied(logits, spec)
    assert np.flatnonzero(found != logits).tolist() == [7, 8]
    assert found[7] == logits[7] - np.float32(0.5) - np.float32(1.0)
    assert found[8] == logits[8] - np.float32(1.0) - np.float32(1.0)


def sampled(logits: np.ndarray, specs: list[RowSpec], form: Form = Form.FULL) -> Sampled:
    rows = torch.from_numpy(np.stack([logits] * len(specs)))
    vocab_size = len(logits)
    state, penalties = state_of(specs, vocab_size), penalties_of(specs, vocab_size)
    return sample_rows(rows, state, penalties, torch.arange(len(specs)), form, 3)


def test_a_penalised_row_leaves_its_neighbours_alone() -> None:
    logits = logits_of(3)
    best, second = np.argsort(-logits)[:2].tolist()
    free = RowSpec(logprobs=2)
    tired = replace(free, presence=100.0, said=(best,))
    found = sampled(logits, [free, tired, free, replace(free, repetition=1.2)])
    assert found.tokens.tolist() == [best, second, best, best]


def test_log_probabilities_are_those_of_the_logits_before_the_penalties() -> None:
    logits = logits_of(4)
    best = int(logits.argmax())
    found = sampled(logits, [RowSpec(presence=100.0, said=(best,), logprobs=2)])
    expected = torch.log_softmax(torch.from_numpy(logits), 0)
    assert found.logprob is not None
    assert found.top_ids is not None
    assert int(found.tokens[0]) != best
    assert float(found.logprob[0]) == pytest.approx(float(expected[found.tokens[0]]), abs=1e-5)
    assert int(found.top_ids[0, 0]) == best


def test_a_bias_comes_after_the_penalties_and_a_mask_holds_whatever_they_say() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[:2] = (4.0, 3.5)
    base = RowSpec(repetition=2.0, said=(0,))
    biased = replace(base, bias=((0, 1.0),))  # 4 / 2 + 1 = 3, below 3.5; (4 + 1) / 2 is too: see the next one
    strong = replace(base, bias=((0, 1.75),))  # 4 / 2 + 1.75 = 3.75, above 3.5; (4 + 1.75) / 2 is not
    masked = replace(base, presence=-100.0, allowed=(1, 2))  # a reward for token 0, which is not allowed
    assert sampled(logits, [base, biased, strong, masked]).tokens.tolist() == [1, 1, 0, 1]


def test_penalties_that_are_all_off_change_nothing_even_with_a_full_history() -> None:
    logits = logits_of(5)
    assert np.array_equal(applied(logits, RowSpec(prompt=tuple(range(40)), said=tuple(range(20, 60)))), logits)


# ---------------------------------------------------------------- what an admission brings


@pytest.mark.parametrize(
    "changes", [{"repetition_penalty": 1.1}, {"presence_penalty": -0.1}, {"frequency_penalty": 0.1}], ids=str
)
def test_a_row_with_any_penalty_needs_the_full_form(changes: dict[str, Any]) -> None:
    stopping = StoppingParams(max_tokens=5)
    assert needs_full(SamplingParams(temperature=0.0, **changes), stopping)
    assert not needs_full(SamplingParams(temperature=0.0), stopping)


def listed(tokens: list[int], prompt_len: int, prompt_matters: bool) -> list[tuple[int, int, bool]]:
    """(token, occurrences, in the prompt) of a penalty list."""
    known = np.array(tokens, np.int32)
    prompt_ids = np.unique(known[:prompt_len]) if prompt_matters else known[:0]
    entries = penalty_list(prompt_ids, known[prompt_len:])
    seen = entries[:, COUNT_SEEN]
    columns = (entries[:, COUNT_TOKEN], seen & ~PROMPT_BIT, (seen & PROMPT_BIT) != 0)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_the_penalty_list_names_each_token_once_in_order() -> None:
    tokens = [9, 3, 3, 60, 7, 3, 7, 7]
    assert listed(tokens, 4, True) == [(3, 1, True), (7, 3, False), (9, 0, True), (60, 0, True)]


def test_without_a_repetition_penalty_the_prompt_is_left_out() -> None:
    tokens = [9, 3, 3, 60, 7, 3, 7, 7]
    assert listed(tokens, 4, False) == [(3, 1, False), (7, 3, False)]
    assert listed([9, 3, 3, 60], 4, False) == []
