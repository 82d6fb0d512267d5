"""A logit of a prompt that is not finite, in Triton and on the reference program: the flag of its own row says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.device import LaunchShape  # noqa: E402
from runahead.cuda_graphs.rings import RingLayout, RingMemory, allocate_rings  # noqa: E402
from runahead.runtime.kernels.reference.forward import ReferenceKernels  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.models.architecture import ModelWeights  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from runahead.runtime.plan import PLAN_WORDS  # noqa: E402
from runahead.runtime.programs.cpu.program import HostProgram  # noqa: E402
from runahead.runtime.programs.cuda.program import TritonProgram  # noqa: E402
from runahead.runtime.wire.parameters import SamplingParams  # noqa: E402
from tests.gpu import gpu_chain  # noqa: E402
from tests.gpu.overflowing_head import overflowing  # noqa: E402
from tests.runtime.launches import Launches, Outcome, PromptEntry, over_program  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
    pytest.mark.usefixtures("without_gradients"),
]

ROWS, EACH, LOUD = 3, 4, 150
CONFIG = gpu_chain.small_config(max_position_embeddings=EACH * 16, num_layers=1, windows=(0,))
LAYOUT = RingLayout(4, PLAN_WORDS, 4096, ROWS, 4, prompt_tokens=64)
SIZES: dict[str, Any] = {"max_rows": ROWS, "num_blocks": ROWS * EACH + 1, "block_size": 16, "context_length": EACH * 16}
ASKING = SamplingParams(temperature=0.0, prompt_logprobs=1)


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, LOUD, length).tolist()


def on_reference(weights: ModelWeights) -> Launches:
    rings = allocate_rings(LAYOUT)
    program = HostProgram(Decoder(CONFIG, weights, ReferenceKernels()), rings, **SIZES)
    return Launches(over_program(program), rings, CONFIG.vocab_size, EACH)


def on_triton(weights: ModelWeights) -> Launches:
    rings: RingMemory
    if DEVICE.type == "cuda":
        from runahead.cuda_graphs.cuda_device import allocate_mapped_rings

        rings = allocate_mapped_rings(LAYOUT)
    else:
        rings = allocate_rings(LAYOUT)
    model = Decoder(CONFIG, gpu_chain.moved(weights, DEVICE), TritonKernelSet())
    run_all = over_program(TritonProgram(model, rings, max_tokens=64, **SIZES))

    def run(shape: LaunchShape) -> None:
        run_all(shape)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    return Launches(run, rings, CONFIG.vocab_size, EACH)


@pytest.mark.parametrize(("place", "sign"), [(2, 1), (20, -1)], ids=["first chunk, +inf", "last one asked for, -inf"])
def test_the_flag_names_the_row_that_asked_and_no_other(place: int, sign: int) -> None:
    prompt = prompt_of(22, seed=1)
    weights = overflowing(CONFIG, gpu_chain.random_weights(CONFIG), prompt[: place + 1], LOUD, sign)

    def play(launches: Launches) -> list[Outcome]:
        """Slot 0 has the prompt and asks, slot 1 has it and does not, slot 2 asks about another prompt."""
        launches.begin(0, prompt, ASKING)
        launches.begin(1, prompt, SamplingParams(temperature=0.0))
        launches.begin(2, prompt_of(40, seed=2), ASKING)
        return [launches.launch({0: 16, 1: 16, 2: 20}), launches.launch({0: 6, 1: 6, 2: 1})]

    found, expected = play(on_triton(weights)), play(on_reference(weights))
    for launch in range(2):
        broken = launch == (place >= 16)
        assert expected[launch].finite == {0: not broken, 1: True, 2: True}
        assert found[launch].finite == expected[launch].finite
        silent = [entry == PromptEntry(0.0, (0,), (0.0,)) for entry in found[launch].prompt[0]]
        assert silent == [broken and at == place % 16 for at in range(len(silent))]
