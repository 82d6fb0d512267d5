"""Experts on the CUDA device: the tokens of the CPU, one graph a decode launch, and bits that hang on nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
import torch

from benchmarks.gpu_table.shapes import SHAPES
from runahead.cuda_graphs.device import Form
from runahead.runtime.kernels.layers import Experts
from runahead.runtime.kernels.quantized_weight import ExpertFp8
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.gpu.gpu_chain import (
    EngineUnderTest,
    check_depth,
    cpu_engine,
    cuda_engine,
    random_requests,
    random_weights,
    small_config,
)
from tests.runtime.chain import tell_of_marks_one_by_one
from tests.runtime.kernels.expert_configs import GLM4_MOE
from tests.runtime.kernels.triton_device import synchronising_calls_raise

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROWS: Final = 8
MIXTRAL: Final[Mapping[str, Any]] = {
    "architecture": "MixtralForCausalLM",
    "experts": 5,
    "chosen": 2,
    "expert_size": 96,
    "renormalised": True,
    "sparse": (True, True),
}
QWEN3_MOE: Final[Mapping[str, Any]] = {
    "architecture": "Qwen3MoeForCausalLM",
    "windows": (0, 20),
    "experts": 11,
    "chosen": 3,
    "expert_size": 40,
    "renormalised": False,
    "sparse": (False, True),
}
HALF: Final[Mapping[str, Any]] = {**QWEN3_MOE, "expert_size": 64, "intermediate_size": 128, "dtype": torch.bfloat16}


def served(under_test: EngineUnderTest) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Tokens and finish reasons of 24 random requests, arriving in two waves."""
    requests = random_requests(small_config(), 24, seed=11)
    for handle, request in enumerate(requests[:12]):
        under_test.submit(handle, *request)
    for _ in range(6):
        under_test.engine.turn()
    for handle, request in enumerate(requests[12:], start=12):
        under_test.submit(handle, *request)
    under_test.run()
    under_test.engine.drain("test")  # compares the device's rows with the host's
    under_test.device.close()
    return under_test.tokens(), under_test.reasons()


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 4])
@pytest.mark.parametrize("changes", [MIXTRAL, QWEN3_MOE, GLM4_MOE], ids=["mixtral", "qwen3 with experts", "glm 4.5"])
def test_experts_give_the_tokens_of_the_cpu_in_float32(run_ahead: int, changes: Mapping[str, Any]) -> None:
    config = small_config(**changes)
    weights = random_weights(config)
    expected = served(cpu_engine(config, weights, 2))
    under_test = cuda_engine(config, weights, run_ahead)
    tell_of_marks_one_by_one(under_test.device)
    assert served(under_test) == expected
    check_depth(under_test, run_ahead)
    assert not under_test.device.counters.fallbacks["mixed"], "launches with prompts are graphs, too"


def output_of(run_ahead: int, place: int, seed: int) -> tuple[list[int], list[tuple[float, ...]]]:
    """Tokens and log-probabilities of one bfloat16 request among `place` others with prompts."""
    config = small_config(**HALF)
    weights = random_weights(config, torch.bfloat16)
    under_test = cuda_engine(config, weights, run_ahead, max_rows=ROWS)
    dice = np.random.default_rng(seed)
    for handle in range(place + 1):
        mine = handle == place
        prompt = [7, 3, 5] if mine else dice.integers(2, config.vocab_size, int(dice.integers(1, 60))).tolist()
        sampling = SamplingParams(temperature=0.9, seed=5 if mine else int(dice.integers(1 << 40)), logprobs=2)
        under_test.submit(handle, prompt, sampling, StoppingParams(max_tokens=40, ignore_eos=True))
    under_test.run()
    under_test.device.close()
    logprobs = []
    for _, message in under_test.links.sent:
        if isinstance(message, m.Output):
            handles = np.frombuffer(message.handles, np.int64)
            for entry in message.logprobs:
                if handles[entry.index] == place:
                    logprobs.append((entry.chosen, *entry.top_logprobs))
    return under_test.tokens()[place], logprobs


def test_experts_say_the_same_to_the_bit_in_any_crowd_at_every_depth() -> None:
    expected = output_of(0, place=0, seed=1)
    assert len(expected[0]) == len(expected[1]) == 40
    for run_ahead, place, seed in ((0, 5, 2), (1, 3, 3), (2, 7, 4), (4, 1, 5), (4, 7, 6)):
        assert output_of(run_ahead, place, seed) == expected, (run_ahead, place, seed)


@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_decode_launch_with_experts_is_one_graph_and_waits_for_nobody(rows: int) -> None:
    config = small_config(**HALF, max_position_embeddings=1024)
    weights = random_weights(config, torch.bfloat16)
    under_test = cuda_engine(config, weights, 2, max_rows=rows, num_blocks=600)
    for handle in range(rows):
        stopping = StoppingParams(max_tokens=400, ignore_eos=True)
        under_test.submit(handle, [2 + handle] * 20, SamplingParams(temperature=0.0), stopping)
    while under_test.engine.scheduler.tally.counters["generated_tokens"] < 5 * rows:
        under_test.engine.turn()
    counters, ledger = under_test.device.counters, under_test.engine.ledger
    replays, fallbacks, first = counters.graph_replays, counters.fallbacks.total(), ledger.launched
    with synchronising_calls_raise():
        while ledger.committed < first + 50:
            under_test.engine.turn()
    assert counters.graph_replays - replays == ledger.launched - first
    assert counters.fallbacks.total() == fallbacks
    key = under_test.device.launch_key(rows, Form.PLAIN)  # type: ignore[attr-defined]
    print(f"decode launch of {rows} rows, 2 layers with experts: {under_test.device.graphs.nodes(key)} nodes")  # type: ignore[attr-defined]
    under_test.links.tell(1, m.Abort(1, (), True))
    under_test.run()
    under_test.device.close()


@pytest.mark.parametrize("quantize", ["none", "fp8"])
def test_a_row_of_a_real_shape_has_the_bits_that_it_has_alone(quantize: str) -> None:
    from tests.runtime.kernels.test_triton_exact_rows import EVERY_BUCKET, Watched, crowds, differing

    real = SHAPES["30B-A3B"]
    config = replace(real, keys={**real.keys, "num_hidden_layers": 2}).described()
    with torch.inference_mode():
        watched = Watched(config, 613, 2048, quantize=quantize)
        experts = watched.model.weights.layers[-1].feed_forward
        assert isinstance(experts, Experts) and isinstance(experts.down[0].quantized, ExpertFp8) == (quantize == "fp8")
        assert differing(watched, crowds(EVERY_BUCKET, 2048, (2, 100, 256))) == []


@pytest.mark.parametrize("form", [(0, 0), (128, 128), (768, 0)], ids=["channels", "blocks", "tensors"])
def test_experts_in_fp8_give_a_row_the_bits_that_it_has_alone(form: tuple[int, int]) -> None:
    from tests.runtime.kernels.fp8_experts import dequantized, fp8_experts
    from tests.runtime.kernels.test_triton_fp8_experts import made

    with torch.inference_mode():
        weights = fp8_experts(2304, 768, form, torch.device("cuda"), count=16, chosen=4)
        alone = made(weights, 1)
        for among in (2, 17, 64, 65, 300, 700):
            assert torch.equal(made(weights, 1, among), alone), among
        found, expected = made(weights, 64).float(), made(dequantized(weights), 64).float()
        assert (found - expected).norm() < 0.06 * expected.norm()
