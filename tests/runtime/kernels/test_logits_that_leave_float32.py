"""Penalties and bias that take a finite logit out of float32: the row ends alone, whatever else it asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings

from runahead.cuda_graphs.device import Form
from runahead.runtime.kernels.reference.sampling import Sampled, sample_rows
from tests.runtime.kernels.extreme_rows import HIGHEST, VOCAB, batches, beyond_what_is_valid, split
from tests.runtime.kernels.sampling_oracle import RowSpec, expect, penalties_of, state_of

MAX_TOP = 4
NEIGHBOUR = RowSpec(temperature=0.9, seed=8, top_p=0.9, logprobs=2)


def sample(logits: torch.Tensor, specs: list[RowSpec], form: Form = Form.FULL) -> Sampled:
    state, penalties = state_of(specs, VOCAB), penalties_of(specs, VOCAB)
    return sample_rows(logits, state, penalties, torch.arange(len(specs)), form, MAX_TOP)


def row_bits(found: Sampled, row: int) -> tuple[object, ...]:
    assert found.logprob is not None
    assert found.top_ids is not None
    assert found.top_logprobs is not None
    columns = (found.tokens, found.finite, found.logprob, found.top_ids, found.top_logprobs)
    return tuple(column[row].numpy().tobytes() for column in columns)


@pytest.mark.parametrize(
    "spec",
    [
        RowSpec(repetition=0.01, prompt=(5,)),
        RowSpec(repetition=100.0, said=(6,)),
        RowSpec(repetition=0.01, said=(5,), allowed=(1, 2)),
        RowSpec(repetition=100.0, prompt=tuple(range(VOCAB))),
    ],
    ids=["upwards", "downwards", "where it is masked", "everywhere"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_penalty_that_leaves_float32_ends_its_row_and_no_other(spec: RowSpec, temperature: float, top_k: int) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[1, 5], logits[1, 6] = 3e38, -3e38
    specs = [NEIGHBOUR, replace(spec, temperature=temperature, top_k=top_k, logprobs=2), RowSpec()]
    found = sample(logits, specs)
    assert found.finite.tolist() == [True, False, True]
    assert found.logprob is not None
    assert (int(found.tokens[1]), float(found.logprob[1])) == (0, 0.0)
    undisturbed = sample(logits, [NEIGHBOUR, RowSpec(), RowSpec()])
    assert undisturbed.finite.all()
    assert [row_bits(found, row) for row in (0, 2)] == [row_bits(undisturbed, row) for row in (0, 2)]


def test_additive_penalties_and_bias_are_too_small_to_leave_float32() -> None:
    logits = torch.full((2, VOCAB), HIGHEST)
    logits[1] = -HIGHEST
    spec = RowSpec(presence=-2.0, frequency=-2.0, said=(1,) * 100, bias=((1, 100.0), (2, -100.0)))
    found = sample(logits, [spec, replace(spec, presence=2.0, frequency=2.0)])
    assert found.finite.tolist() == [True, True]
    assert found.tokens.tolist() == [0, 0]


def test_the_log_probability_of_a_token_too_far_below_the_best_is_minus_infinity() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 1], logits[0, 2] = 3e38, -3e38
    found = sample(logits, [RowSpec(allowed=(2,), logprobs=1)])
    assert found.logprob is not None
    assert found.top_logprobs is not None
    assert found.finite.tolist() == [True]
    assert (int(found.tokens[0]), float(found.logprob[0])) == (2, float("-inf"))
    assert found.top_logprobs[0, 0] == 0.0


@settings(deadline=None, max_examples=100)
@given(batches)
@example([([0.0, 1e-45, *[-HIGHEST] * (VOCAB - 2)], RowSpec(temperature=100.0, top_p=0.5, position=9))])
def test_extreme_rows_have_a_token_that_may_be_drawn_or_end_alone(
    batch: list[tuple[list[float], RowSpec]],
) -> None:
    logits, specs = split(batch)
    found = sample(logits, specs)
    plain = sample(logits, specs, Form.PLAIN)
    assert plain.finite.all()
    for row, spec in enumerate(specs):
        expected = expect(logits[row].numpy(), spec)
        assert bool(found.finite[row]) == expected.finite
        assert int(found.tokens[row]) in (expected.kept if expected.finite else {0})
        if spec.temperature == 0.0:
            assert int(found.tokens[row]) == expected.token
        alone = sample(logits[row : row + 1], [spec])
        assert row_bits(alone, 0) == row_bits(found, row)


def test_parameters_that_nobody_may_send_end_their_own_rows_at_most() -> None:
    logits, specs = beyond_what_is_valid()
    found = sample(logits, specs)
    assert found.finite.tolist() == [True, True, False, True, False, False, False, False, True]
    for row, spec in enumerate(specs):
        assert row_bits(sample(logits[row : row + 1], [spec]), 0) == row_bits(found, row)
