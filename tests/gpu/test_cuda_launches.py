"""What F leaves and what penalties do on the CUDA device, captured graphs and all, against the reference program."""

from __future__ import annotations

import pytest
import torch

from runahead.cuda_graphs.device import Device, Form
from runahead.runtime.wire.parameters import SamplingParams
from tests.gpu import gpu_chain, launch_scenarios
from tests.gpu.launch_scenarios import CONFIG, LAYOUT, MAX_TOKENS, ROWS, Stage
from tests.runtime.launches import over_device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("without_gradients")]

PROMPT_TOLERANCE = 2e-5


def cuda_stage(dtype: torch.dtype = torch.float32) -> tuple[Stage, Device]:
    from runahead.cuda_graphs.cuda_device import CudaDevice, allocate_mapped_rings
    from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
    from runahead.runtime.models.decoder import Decoder
    from tests.runtime.kernels.poisoned_program import PoisonedProgram

    rings = allocate_mapped_rings(LAYOUT)
    weights = gpu_chain.moved(gpu_chain.random_weights(CONFIG, dtype), torch.device("cuda"))
    program = PoisonedProgram(
        Decoder(CONFIG, weights, TritonKernelSet()),
        rings,
        max_rows=ROWS,
        max_tokens=MAX_TOKENS,
        num_blocks=launch_scenarios.NUM_BLOCKS,
        block_size=launch_scenarios.BLOCK_SIZE,
        context_length=launch_scenarios.CONTEXT,
        penalty_slots=launch_scenarios.PENALTY_SLOTS,
    )
    device = CudaDevice(program, rings, max_rows=ROWS, mixed_tokens=MAX_TOKENS - ROWS)

    def poison_blocks(blocks: tuple[int, ...]) -> None:
        program.poison_blocks(blocks)
        torch.cuda.synchronize()

    def poison_penalty_slot(slot: int) -> None:
        program.poison_penalty_slot(slot)
        torch.cuda.synchronize()

    launches = launch_scenarios.make_launches(over_device(device), rings)
    list_samples = launch_scenarios.lists_samples_of(program)
    return Stage(launches, poison_blocks, poison_penalty_slot, list_samples).spoil(), device


def test_penalised_rows_have_the_tokens_of_the_reference() -> None:
    expected = launch_scenarios.penalised(launch_scenarios.reference_stage())
    stage, device = cuda_stage()
    found = launch_scenarios.penalised(stage)
    counters = device.counters
    device.close()
    print(f"{counters.graph_replays} replays, fallbacks {dict(counters.fallbacks)}")
    assert found == expected
    assert found["penalised"] != found["free"], "the penalties changed nothing"
    assert set(counters.fallbacks) == {"closing"}


@pytest.mark.parametrize("decodes", [0, 3])
def test_a_row_that_s_holds_back_keeps_its_logits_over_the_launches_of_others(decodes: int) -> None:
    expected = launch_scenarios.held_back(launch_scenarios.reference_stage(), 0)
    stage, device = cuda_stage()
    found = launch_scenarios.held_back(stage, decodes)
    prompts = 2 if decodes else 1
    assert device.counters.graph_replays - sum(device.counters.fallbacks.values()) == prompts + decodes
    device.close()
    assert found == expected


def test_a_nan_in_one_row_s_cache_shows_in_its_own_flag_only() -> None:
    stage, device = cuda_stage()
    launch_scenarios.flags_are_right(launch_scenarios.flags(stage))
    device.close()


def test_prompt_log_probabilities_are_those_of_the_reference() -> None:
    expected = launch_scenarios.prompt_entries(launch_scenarios.reference_stage(), [], ())
    for cuts, neighbours in (([], ()), ([40], (0, 1, 4)), ([1, 33, 64], (2,))):
        stage, device = cuda_stage()
        found = launch_scenarios.prompt_entries(stage, cuts, neighbours)
        device.close()
        errors = [abs(ours.logprob - theirs.logprob) for ours, theirs in zip(found, expected, strict=True)]
        print(f"cuts {cuts}, neighbours {neighbours}: largest difference {max(errors):.1e}")
        launch_scenarios.entries_agree(found, expected, PROMPT_TOLERANCE)


def test_prompt_log_probabilities_have_the_same_bits_whatever_is_in_the_other_rows() -> None:
    found = []
    for seed in (0, 1):
        stage, device = cuda_stage(torch.bfloat16)
        stage.launches.begin(0, launch_scenarios.prompt_of(30, seed), SamplingParams(prompt_logprobs=seed))
        stage.launches.begin(3, launch_scenarios.PROMPT, SamplingParams(prompt_logprobs=2))
        found.append(stage.launches.launch({0: 30, 3: 40}).prompt[3] + stage.launches.launch({3: 100}).prompt[3])
        device.close()
    assert found[0] == found[1]


def test_a_launch_that_leaves_log_probabilities_of_prompts_is_no_graph_for_them_alone() -> None:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
    stage, device = cuda_stage()
    stage.launches.begin(0, launch_scenarios.PROMPT, sampling)
    found = stage.launches.launch({0: 1}).prompt[0]
    assert dict(device.counters.fallbacks) == {"prompt_logprobs": 1}
    stage.launches.launch({0: 100})
    stage.launches.launch({0: 1})
    assert dict(device.counters.fallbacks) == {"prompt_logprobs": 2}, "and its decode launch is one again"
    device.close()
    expected = launch_scenarios.prompt_entries(launch_scenarios.reference_stage(), [1], ())[0]
    assert abs(found[0].logprob - expected.logprob) <= PROMPT_TOLERANCE
    assert found[0].top_ids == expected.top_ids[:1]


def test_a_decode_launch_is_one_graph_with_one_node_more_for_its_flags() -> None:
    _, device = cuda_stage()
    nodes = {form: device.graphs.nodes(device.launch_key(ROWS, form)) for form in Form}  # type: ignore[attr-defined]
    print(f"decode launch of {ROWS} rows, {CONFIG.num_layers} layers: nodes {nodes}")
    assert nodes[Form.FULL] > nodes[Form.PLAIN] > 10
    device.close()
