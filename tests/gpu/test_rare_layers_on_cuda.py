"""What few families have, on the CUDA device: scores and logits that a tanh bounds, feed-forwards and experts without
gates, layers that are a mixer or a feed-forward. The tokens of the CPU, and bits that hang on nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from runahead.runtime.models.blocks.dense import DenseConfig
from tests.gpu.gpu_chain import cpu_engine, cuda_engine, random_weights, small_config
from tests.gpu.test_hybrids_on_cuda import output_among, served
from tests.runtime.kernels.hybrid_configs import hybrid

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def bounded(**changes: Any) -> DenseConfig:
    """A Gemma 2, whose scores and logits are so large that the bounds bend them; windows on one of its two layers."""
    return small_config(
        architecture="Gemma2ForCausalLM", windows=(0, 24), intermediate_size=128, query_pre_attn_scalar=20.0,
        score_cap=0.5, logit_cap=1.5, **changes,
    )  # fmt: skip


def halved(**changes: Any) -> DenseConfig:
    return hybrid("NemotronHForCausalLM", **changes)


CONFIGS: Final[dict[str, Callable[..., DenseConfig]]] = {"gemma 2": bounded, "nemotron-h": halved}


@pytest.mark.parametrize("config_of", CONFIGS.values(), ids=CONFIGS)
def test_tokens_are_those_of_the_cpu_in_float32(config_of: Callable[..., DenseConfig]) -> None:
    config = config_of()
    weights = random_weights(config)
    assert served(cuda_engine(config, weights, 2)) == served(cpu_engine(config, weights, 2))


@pytest.mark.parametrize("config_of", CONFIGS.values(), ids=CONFIGS)
def test_a_request_says_the_same_to_the_bit_in_any_crowd(
    config_of: Callable[..., DenseConfig],
) -> None:
    config = config_of(dtype=torch.bfloat16)
    expected = output_among(config, 0, place=0, seed=1)
    assert len(expected[0]) == len(expected[1]) == 40
    for run_ahead, place, seed in ((1, 5, 2), (4, 7, 4)):
        assert output_among(config, run_ahead, place, seed) == expected, (run_ahead, place, seed)
