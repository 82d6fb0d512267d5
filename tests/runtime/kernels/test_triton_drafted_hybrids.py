"""Drafts over recurrent states, S, apply, draft and F in Triton: they change no token, and no bit; and a row goes on
from snapshots of borders that lay inside runs."""

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
    # The interpreter's own way with a loop whose length is read on the device.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

from runahead.runtime.models.memory import memory_of  # noqa: E402
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams  # noqa: E402
from tests.gpu import gpu_chain  # noqa: E402
from tests.runtime.kernels.drafted_engine import NUM_BLOCKS, drafted_engine, served  # noqa: E402
from tests.runtime.kernels.hybrid_configs import HYBRIDS, hybrid  # noqa: E402

MAX_ROWS = 4
REQUESTS = 6  # two more than there are rows, so that state slots are used again


@pytest.mark.large
@pytest.mark.parametrize("run_ahead", [0, 1, 2, 4])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_the_tokens_are_those_of_the_cpu_without_drafts(architecture: str, run_ahead: int) -> None:
    config = hybrid(architecture, max_position_embeddings=96)
    weights = gpu_chain.random_weights(config)
    plain = gpu_chain.cpu_engine(config, weights, 2, max_rows=MAX_ROWS, num_blocks=NUM_BLOCKS)
    expected = served(plain, config, REQUESTS, few=True)
    drafted = drafted_engine(config, DEVICE, run_ahead, MAX_ROWS, drafts=True)
    found = served(drafted, config, REQUESTS, few=True)
    assert found[:2] == expected[:2]
    stats = drafted.engine.stats()
    assert stats.drafted[1] > stats.accepted[1] > 0, "as if drafts were all right, or none"


def test_slots_of_rows_have_room_for_the_inputs_of_drafts_and_snapshots_have_none() -> None:
    config, most = hybrid("Qwen3NextForCausalLM"), 7
    program = drafted_engine(config, DEVICE, 2, MAX_ROWS, drafts=True, snapshots=3).program
    cache, weights = program._cache, gpu_chain.random_weights(config)
    kept = memory_of(weights.layers).bytes_kept(gpu_chain.BLOCK_SIZE, torch.float32, most)
    taken = [tensor.nbytes for mixer in (*cache.states, cache.runs) for tensor in mixer]
    assert sum(taken) == MAX_ROWS * kept.row + 3 * kept.snapshot
    assert all(run.isnan().all() for run in cache.runs), "the test mode has spoilt them"


@pytest.mark.large
@pytest.mark.parametrize("run_ahead", [0, 1, 2, 4])
@pytest.mark.parametrize("architecture", ["BambaForCausalLM", "Qwen3NextForCausalLM"])
def test_no_bit_of_a_log_probability_changes(
    architecture: str, run_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    config = hybrid(architecture, max_position_embeddings=96)
    plain = drafted_engine(config, DEVICE, run_ahead, 3, drafts=False, dtype=torch.bfloat16)
    expected = served(plain, config, 4, few=True)
    drafted = drafted_engine(config, DEVICE, run_ahead, 3, drafts=True, dtype=torch.bfloat16)
    assert served(drafted, config, 4, few=True) == expected
    assert drafted.engine.stats().accepted[1] > 0
    assert any(expected[2].values())


@pytest.mark.large
def test_what_was_said_comes_again_as_a_prompt_and_goes_on_from_a_border_that_lay_inside_a_run() -> None:
    """Prompts and completions come again as longer prompts: the borders behind the first prompt were reached by
    decoding with drafts. What follows is said by the CPU, which finds nothing, too."""
    config = hybrid("GraniteMoeHybridForCausalLM", max_position_embeddings=96)  # which repeats itself
    weights = gpu_chain.random_weights(config)

    def said(under_test: gpu_chain.EngineUnderTest) -> list[list[int]]:
        prompt, found = [5, 9, 5, 9, 5, 9, 5, 9], []
        with torch.inference_mode():
            for handle, more in enumerate((30, 30, 20)):
                stopping = StoppingParams(max_tokens=more, ignore_eos=True)
                under_test.submit(handle, prompt, SamplingParams(temperature=0.0), stopping)
                under_test.run()
                found.append(under_test.tokens()[handle])
                prompt = prompt + found[-1]
            under_test.engine.drain("test")  # compares the device's snapshots with the host's, too
        under_test.device.close()
        return found

    expected = said(gpu_chain.cpu_engine(config, weights, 2, max_rows=MAX_ROWS, num_blocks=NUM_BLOCKS))
    drafted = drafted_engine(config, DEVICE, 2, MAX_ROWS, drafts=True, snapshots=6)
    assert said(drafted) == expected
    stats = drafted.engine.stats()
    assert stats.accepted[3] > 0, "no run was long enough to have a border inside"
    assert stats.snapshots_found == 2 and stats.cached_tokens == 32 + 64
