"""Recurrent states on the CUDA device: the tokens of the CPU, one graph a decode launch that reads 64 bytes, and bits
that hang on nobody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
import torch

from benchmarks.gpu_table.shapes import SHAPES
from runahead.cuda_graphs.device import Form
from runahead.runtime.models.blocks.dense import DenseConfig
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
from tests.runtime.kernels import drafted_engine
from tests.runtime.kernels.drafted_engine import ChangingForms
from tests.runtime.kernels.hybrid_configs import HYBRIDS, hybrid
from tests.runtime.kernels.triton_device import synchronising_calls_raise

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROWS: Final = 8
# Requests of 40 tokens and prompts of up to 59 fit; prompts are cut at 32, and sub-chunks of bfloat16 at 64.
BITS: Final = ("BambaForCausalLM", "Qwen3NextForCausalLM")


def served(under_test: EngineUnderTest) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Tokens and finish reasons of 24 random requests in two waves: every state slot has several of them."""
    requests = random_requests(small_config(), 24, seed=13)
    for handle, request in enumerate(requests[:12]):
        under_test.submit(handle, *request)
    for _ in range(6):
        under_test.engine.turn()
    for handle, request in enumerate(requests[12:], start=12):
        under_test.submit(handle, *request)
    under_test.run()
    under_test.engine.drain("test")  # compares the device's rows with the host's
    slots = under_test.engine.scheduler.holdings.state_slots
    assert slots.free == slots.total
    under_test.device.close()
    return under_test.tokens(), under_test.reasons()


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 4])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_hybrids_give_the_tokens_of_the_cpu_in_float32(run_ahead: int, architecture: str) -> None:
    config = hybrid(architecture)
    weights = random_weights(config)
    expected = served(cpu_engine(config, weights, 2))
    under_test = cuda_engine(config, weights, run_ahead)
    tell_of_marks_one_by_one(under_test.device)
    assert served(under_test) == expected
    check_depth(under_test, run_ahead)


@pytest.mark.parametrize("architecture", BITS)
def test_prompts_that_come_again_begin_with_a_snapshot_and_say_the_same(architecture: str) -> None:
    """In float32, the tokens of the CPU without a snapshot."""
    config = hybrid(architecture)
    weights = random_weights(config)
    prompts = [[(3 * place + place * place) % 150 + 2 for place in range(length)] for length in (33, 33, 50, 100)]

    def said(under_test: EngineUnderTest) -> dict[int, list[int]]:
        for handle, prompt in enumerate(prompts):
            stopping = StoppingParams(max_tokens=40, ignore_eos=True)
            under_test.submit(handle, prompt, SamplingParams(temperature=0.0), stopping)
            under_test.run()
        under_test.engine.drain("test")  # compares the device's snapshots with the host's, too
        under_test.device.close()
        return under_test.tokens()

    expected = said(cpu_engine(config, weights, 2))
    with_snapshots = cuda_engine(config, weights, 2, snapshots=8)
    assert said(with_snapshots) == expected
    assert with_snapshots.engine.stats().snapshots_found == 3


class Sometimes(ChangingForms):
    """Three drafts in most launches."""

    most = 3

    def drafts(self, number: int, rows: int) -> int:
        return 0 if number % 7 == 6 else 3


@pytest.mark.parametrize("architecture", BITS)
def test_drafts_change_no_bit_at_any_depth(architecture: str) -> None:
    """Tokens, reasons and log-probabilities, also where rows leave snapshots; and at a
    drain the device's rows are the host's."""
    config: Any = hybrid(architecture, dtype=torch.bfloat16, max_position_embeddings=96)
    weights = random_weights(config, torch.bfloat16)

    def engine(run_ahead: int, snapshots: int, *, drafts: bool) -> EngineUnderTest:
        return cuda_engine(
            config, weights, run_ahead, max_rows=4, num_blocks=65, snapshots=snapshots,
            drafts=Sometimes() if drafts else None, draft_rows=4 if drafts else 0, draft_forms=(3,) if drafts else (),
        )  # fmt: skip

    expected = drafted_engine.served(engine(0, 0, drafts=False), config, 6, few=True)
    for run_ahead, snapshots in ((0, 0), (1, 0), (2, 8), (4, 0)):
        drafted = engine(run_ahead, snapshots, drafts=True)
        assert drafted_engine.served(drafted, config, 6, few=True) == expected, (
            f"depth {run_ahead}, {snapshots} snapshots"
        )
        stats = drafted.engine.stats()
        print(f"{architecture}, depth {run_ahead}: drafted {stats.drafted}, accepted {stats.accepted}")
        assert stats.accepted[1] > 0, "no draft was right, as if none had been verified"
        assert stats.fallbacks["drafts"] > 0, "the number of drafts never changed"


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_drafts_give_the_tokens_of_the_cpu_in_float32(architecture: str) -> None:
    config = hybrid(architecture, max_position_embeddings=96)
    weights = random_weights(config)
    expected = drafted_engine.served(cpu_engine(config, weights, 2, max_rows=4, num_blocks=65), config, 6, few=True)
    drafted = cuda_engine(
        config, weights, 2, max_rows=4, num_blocks=65, drafts=Sometimes(), draft_rows=4, draft_forms=(3,)
    )
    assert drafted_engine.served(drafted, config, 6, few=True)[:2] == expected[:2]
    assert drafted.engine.stats().accepted[1] > 0


def output_among(
    config: DenseConfig, run_ahead: int, place: int, seed: int
) -> tuple[list[int], list[tuple[float, ...]]]:
    """Tokens and log-probabilities of one bfloat16 request among `place` others with prompts."""
    weights = random_weights(config, torch.bfloat16)
    under_test = cuda_engine(config, weights, run_ahead, max_rows=ROWS)
    dice = np.random.default_rng(seed)
    for handle in range(place + 1):
        mine = handle == place
        prompt = list(range(2, 80)) if mine else dice.integers(2, config.vocab_size, int(dice.integers(1, 60))).tolist()
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


@pytest.mark.parametrize("architecture", BITS)
def test_a_request_says_the_same_to_the_bit_in_any_crowd_at_every_depth(architecture: str) -> None:
    """Its prompt is cut at the same positions whoever else there is."""
    config = hybrid(architecture, dtype=torch.bfloat16)
    expected = output_among(config, 0, place=0, seed=1)
    assert len(expected[0]) == len(expected[1]) == 40
    for run_ahead, place, seed in ((0, 5, 2), (1, 3, 3), (2, 7, 4), (4, 1, 5), (4, 7, 6)):
        assert output_among(config, run_ahead, place, seed) == expected, (run_ahead, place, seed)


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_decode_launch_is_one_graph_reads_64_bytes_and_waits_for_nobody(architecture: str, rows: int) -> None:
    config = hybrid(architecture, dtype=torch.bfloat16, max_position_embeddings=1024)
    weights = random_weights(config, torch.bfloat16)
    under_test = cuda_engine(config, weights, 2, max_rows=rows, num_blocks=600)
    for handle in range(rows):
        stopping = StoppingParams(max_tokens=400, ignore_eos=True)
        under_test.submit(handle, [2 + handle] * 20, SamplingParams(temperature=0.0), stopping)
    while under_test.engine.scheduler.tally.counters["generated_tokens"] < 5 * rows:
        under_test.engine.turn()
    counters, ledger = under_test.device.counters, under_test.engine.ledger
    replays, fallbacks, first, read = (
        counters.graph_replays,
        counters.fallbacks.total(),
        ledger.launched,
        counters.bytes_to_device,
    )
    with synchronising_calls_raise():
        while ledger.committed < first + 50:
            under_test.engine.turn()
    launches = ledger.launched - first
    assert counters.graph_replays - replays == launches
    assert counters.fallbacks.total() == fallbacks
    blocks = rows * (launches // 16 + 1)  # a block is sent for each 16 tokens of a row
    assert counters.bytes_to_device - read <= 64 * (launches + 2) + 12 * blocks
    key = under_test.device.launch_key(rows, Form.PLAIN)  # type: ignore[attr-defined]
    nodes = under_test.device.graphs.nodes(key)  # type: ignore[attr-defined]
    print(f"{architecture}, decode launch of {rows} rows, 2 layers: {nodes} nodes")
    under_test.links.tell(1, m.Abort(1, (), True))
    under_test.run()
    under_test.device.close()


def test_a_row_of_a_real_shape_has_the_bits_that_it_has_alone() -> None:
    from tests.runtime.kernels.test_triton_exact_rows import EVERY_BUCKET, Watched, crowds, differing

    real = SHAPES["7B-A1B"]
    keys = {**real.keys, "num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}
    config = replace(real, keys=keys).described()
    with torch.inference_mode():
        watched = Watched(config, 613, 2048)
        assert differing(watched, crowds(EVERY_BUCKET, 2048, (2, 100, 256))) == []
