"""What F leaves and what penalties do, in Triton against the reference program, over the same launches by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.rings import allocate_rings  # noqa: E402
from runahead.cuda_graphs.shape import LaunchShape  # noqa: E402
from runahead.runtime.kernels.triton.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from runahead.runtime.programs.triton import TritonProgram  # noqa: E402
from tests.gpu import gpu_chain, launch_scenarios  # noqa: E402
from tests.runtime.launches import over_program  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.timeout(600),  # whole launches in Triton's interpreter take their time
]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def triton_stage() -> launch_scenarios.Stage:
    """Triton kernels launched one by one, no graph."""
    if DEVICE.type == "cuda":
        from runahead.cuda_graphs.cuda_device import allocate_mapped_rings

        rings = allocate_mapped_rings(launch_scenarios.LAYOUT)
    else:
        rings = allocate_rings(launch_scenarios.LAYOUT)
    config = launch_scenarios.CONFIG
    program = TritonProgram(
        Decoder(config, gpu_chain.moved(gpu_chain.random_weights(config), DEVICE), TritonKernelSet()),
        rings,
        max_rows=launch_scenarios.ROWS,
        max_tokens=launch_scenarios.MAX_TOKENS,
        num_blocks=launch_scenarios.NUM_BLOCKS,
        block_size=launch_scenarios.BLOCK_SIZE,
        context_length=launch_scenarios.CONTEXT,
        penalty_slots=launch_scenarios.PENALTY_SLOTS,
    )
    run_all = over_program(program)

    def run(shape: LaunchShape) -> None:
        run_all(shape)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    launches = launch_scenarios.make_launches(run, rings)
    return launch_scenarios.Stage(
        launches, program.poison_blocks, program.poison_penalty_slot, launch_scenarios.lists_samples_of(program)
    ).spoil()


def test_a_row_that_s_holds_back_keeps_its_logits_over_the_launches_of_others() -> None:
    expected = launch_scenarios.held_back(launch_scenarios.reference_stage(), 0)
    assert set(expected) == {1, 4}
    for stage in (launch_scenarios.reference_stage(), triton_stage()):
        assert launch_scenarios.held_back(stage, 2) == expected


def test_penalised_rows_have_the_tokens_of_the_reference() -> None:
    found = launch_scenarios.penalised(triton_stage())
    assert found == launch_scenarios.penalised(launch_scenarios.reference_stage())
    assert found["penalised"] != found["free"], "the penalties changed nothing"


def test_a_nan_in_one_row_s_cache_shows_in_its_own_flag_only() -> None:
    for stage in (launch_scenarios.reference_stage(), triton_stage()):
        launch_scenarios.flags_are_right(launch_scenarios.flags(stage))


def test_prompt_log_probabilities_are_those_of_the_reference() -> None:
    expected = launch_scenarios.prompt_entries(launch_scenarios.reference_stage(), [], ())
    for cuts, neighbours in (([40], (0, 1, 4)), ([1, 33], ())):
        found = launch_scenarios.prompt_entries(triton_stage(), cuts, neighbours)
        launch_scenarios.entries_agree(found, expected, 2e-5)
