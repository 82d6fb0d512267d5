"""What the sampler draws, counted: chi-square against the distribution it promises. Seeds are fixed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from runahead.cuda_graphs.device import Form
from runahead.runtime.kernels.reference.sampling import sample_rows
from tests.runtime.kernels.sampling_oracle import RowSpec, expect, penalties_of, state_of


def chi_square_is_plausible(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Whether counts fit, at a level of about 1 in 10,000 (Wilson and Hilferty's approximation)."""
    assert not counts[probabilities == 0].any()
    inside = probabilities > 0
    expected = counts.sum() * probabilities[inside]
    statistic = float(((counts[inside] - expected) ** 2 / expected).sum())
    degrees = int(inside.sum()) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
    return statistic < limit


def draw_many(logits: np.ndarray, spec: RowSpec, draws: int, form: Form) -> np.ndarray:
    """Tokens of `draws` rows, half of them new positions of one seed and half new seeds at one position."""
    half = draws // 2
    specs = [replace(spec, seed=42, position=index) for index in range(half)]
    specs += [replace(spec, seed=1000 + index, position=3) for index in range(half)]
    rows = torch.from_numpy(logits).expand(draws, -1).contiguous()
    state, penalties = state_of(specs, logits.shape[0]), penalties_of(specs, logits.shape[0])
    return sample_rows(rows, state, penalties, torch.arange(draws), form, 0).tokens.numpy()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_draws_from_the_softmax(temperature: float) -> None:
    logits = np.random.default_rng(19).normal(size=24).astype(np.float32)
    tokens = draw_many(logits, RowSpec(temperature=temperature), 8000, Form.PLAIN)
    weights = np.exp(logits.astype(np.float64) / temperature)
    assert chi_square_is_plausible(np.bincount(tokens, minlength=24), weights / weights.sum())


def test_top_p_draws_from_what_is_left_of_the_softmax() -> None:
    logits = np.random.default_rng(20).normal(size=24).astype(np.float32)
    spec = RowSpec(temperature=1.0, top_p=0.8)
    kept = np.zeros(24)
    kept[list(expect(logits, spec).kept)] = 1.0
    weights = np.exp(logits.astype(np.float64)) * kept
    assert 1 < kept.sum() < 24
    tokens = draw_many(logits, spec, 6000, Form.FULL)
    assert chi_square_is_plausible(np.bincount(tokens, minlength=24), weights / weights.sum())


def test_tokens_at_neighbouring_positions_are_independent() -> None:
    tokens = draw_many(np.zeros(6, np.float32), RowSpec(temperature=1.0), 16000, Form.PLAIN)[:8000]
    pairs = np.bincount(tokens[0::2] * 6 + tokens[1::2], minlength=36)
    assert chi_square_is_plausible(pairs, np.full(36, 1 / 36))


def test_the_statistical_check_sees_a_bias() -> None:
    assert not chi_square_is_plausible(np.array([1100, 900]), np.array([0.5, 0.5]))
