"""Whole launches of hybrid models in Triton, S, apply and F, on the host device: the reference program's tokens."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = [
    pytest.mark.timeout(600),  # a whole engine in Triton's interpreter takes its time
    # The interpreter's own way with a loop whose length is read on the device.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

from runahead.cuda_graphs.rings import STATUS_BYTES  # noqa: E402
from runahead.runtime.plan import HEADER_WORDS, read_plan  # noqa: E402
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams  # noqa: E402
from tests.gpu import gpu_chain  # noqa: E402
from tests.runtime.kernels.hybrid_configs import HYBRIDS, hybrid  # noqa: E402
from tests.runtime.kernels.test_triton_program import MAX_ROWS, NUM_BLOCKS, eager_engine  # noqa: E402

PROMPTS = (1, 37, 33, 5, 20, 41, 2)  # two more than there are rows, so that state slots are used again


def served(under_test: gpu_chain.EngineUnderTest) -> dict[int, list[int]]:
    """Tokens of greedy requests, whose state slots have other requests' before them."""
    with torch.inference_mode():
        for handle, length in enumerate(PROMPTS):
            prompt = [(5 * handle + 3 * place + place * place) % 150 + 2 for place in range(length)]
            stopping = StoppingParams(max_tokens=3 + handle % 3)
            under_test.submit(handle, prompt, SamplingParams(temperature=0.0), stopping)
        under_test.run()
        under_test.engine.drain("test")  # compares the device's rows with the host's
    slots = under_test.engine.scheduler.holdings.state_slots
    assert slots.free == slots.total == MAX_ROWS
    under_test.device.close()
    return under_test.tokens()


@pytest.mark.large
@pytest.mark.parametrize("run_ahead", [0, 1, 2, 4])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_the_tokens_of_the_reference(architecture: str, run_ahead: int) -> None:
    config = hybrid(architecture, max_position_embeddings=96)
    weights = gpu_chain.random_weights(config)
    expected = served(gpu_chain.cpu_engine(config, weights, 2, max_rows=MAX_ROWS, num_blocks=NUM_BLOCKS))
    assert len(expected) == len(PROMPTS)
    assert served(eager_engine(run_ahead, config)) == expected


def test_a_steady_launch_of_a_hybrid_reads_64_bytes() -> None:
    under_test = eager_engine(2, hybrid("Qwen3NextForCausalLM", max_position_embeddings=96))
    rings, steady = under_test.device.rings, 0
    with torch.inference_mode():
        for handle in range(2):
            stopping = StoppingParams(max_tokens=12, ignore_eos=True)
            under_test.submit(handle, [2 + handle, 9], SamplingParams(temperature=0.0), stopping)
        for _ in range(100):
            under_test.engine.turn()
            number = under_test.device.ended()
            slot = rings.slot(number)
            plan = read_plan(rings.plan[slot])
            if plan.number == number and plan.num_rows == 2 and plan.words == HEADER_WORDS:
                assert rings.status[slot, STATUS_BYTES] == 64
                steady += 1
            if not len(under_test.engine.registry) and not under_test.links.unread:
                break
        under_test.run()
    under_test.device.close()
    assert steady > 4


@pytest.mark.parametrize(
    "architecture", ["BambaForCausalLM", pytest.param("Qwen3NextForCausalLM", marks=pytest.mark.large)]
)
def test_prompts_that_come_again_begin_with_a_snapshot_and_say_the_same(architecture: str) -> None:
    """As the reference does that finds none. Snapshots are at every 32nd token: two requests begin behind the first,
    one of them with a single token more."""
    config = hybrid(architecture, max_position_embeddings=96)
    weights = gpu_chain.random_weights(config)
    prompts = [[(3 * place + place * place) % 150 + 2 for place in range(length)] for length in (33, 33, 50)]

    def said(under_test: gpu_chain.EngineUnderTest) -> dict[int, list[int]]:
        with torch.inference_mode():
            for handle, prompt in enumerate(prompts):
                stopping = StoppingParams(max_tokens=3, ignore_eos=True)
                under_test.submit(handle, prompt, SamplingParams(temperature=0.0), stopping)
                under_test.run()
            under_test.engine.drain("test")  # compares the device's snapshots with the host's, too
        under_test.device.close()
        return under_test.tokens()

    expected = said(gpu_chain.cpu_engine(config, weights, 2, max_rows=MAX_ROWS, num_blocks=NUM_BLOCKS))
    with_snapshots = eager_engine(2, config, snapshots=4)
    assert said(with_snapshots) == expected
    stats = with_snapshots.engine.stats()
    assert stats.snapshots_kept > 0 and stats.snapshots_found == 2 and stats.cached_tokens == 2 * 32
