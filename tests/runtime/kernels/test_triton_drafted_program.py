"""Launches that verify drafts, S, apply, draft and F in Triton: drafts change no token, and no bit."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.kernels.matrix_units import multiply_as_matrix_units
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = [
    pytest.mark.timeout(600),  # a whole engine in Triton's interpreter takes its time
    # Lines that no row needs hold whatever memory held: nobody reads what is computed of them.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

from tests.gpu import gpu_chain  # noqa: E402
from tests.runtime.kernels.drafted_engine import NUM_BLOCKS, drafted_engine, served  # noqa: E402

MAX_ROWS = 4
REQUESTS = 6


@pytest.mark.parametrize("run_ahead", [2, *(pytest.param(depth, marks=pytest.mark.large) for depth in (0, 1, 4))])
def test_the_tokens_are_those_of_the_cpu_without_drafts(run_ahead: int) -> None:
    config = gpu_chain.small_config(max_position_embeddings=96, architecture="Qwen3ForCausalLM", windows=(0, 24))
    weights = gpu_chain.random_weights(config)
    plain = gpu_chain.cpu_engine(config, weights, 2, max_rows=MAX_ROWS, num_blocks=NUM_BLOCKS)
    expected = served(plain, config, REQUESTS)
    drafted = drafted_engine(config, DEVICE, run_ahead, MAX_ROWS, drafts=True)
    found = served(drafted, config, REQUESTS)
    assert found[:2] == expected[:2]
    stats = drafted.engine.stats()
    assert stats.accepted[1] > stats.accepted[3] > 0 and stats.drafted[1] > stats.accepted[1], "of every kind"
    assert stats.drafted[7] > 0


@pytest.mark.parametrize("run_ahead", [1, *(pytest.param(depth, marks=pytest.mark.large) for depth in (0, 2, 4))])
def test_no_bit_of_a_log_probability_changes(run_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    config = gpu_chain.small_config(
        max_position_embeddings=96, architecture="Qwen3ForCausalLM", windows=(0, 24), intermediate_size=64
    )
    plain = drafted_engine(config, DEVICE, run_ahead, 3, drafts=False, dtype=torch.bfloat16)
    expected = served(plain, config, 4)
    drafted = drafted_engine(config, DEVICE, run_ahead, 3, drafts=True, dtype=torch.bfloat16)
    assert served(drafted, config, 4) == expected
    accepted = drafted.engine.stats().accepted
    assert accepted[1] > 0 and accepted[3] > 0
    assert any(expected[2].values())
