"""A row's logits are the same to the bit from its prompt's first chunk on, whoever begins or
goes on in the same launches: whole launches, S, apply and F, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("matrix_units")]

from runahead.cuda_graphs.buckets import Buckets, GraphKey, Piece  # noqa: E402
from runahead.cuda_graphs.device import LaunchShape  # noqa: E402
from runahead.cuda_graphs.rings import RingLayout, RingMemory  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from runahead.runtime.plan import PLAN_WORDS  # noqa: E402
from runahead.runtime.wire.parameters import SamplingParams  # noqa: E402
from tests.gpu import gpu_chain  # noqa: E402
from tests.runtime.kernels.device_twin import mapped_rings  # noqa: E402
from tests.runtime.kernels.poisoned_program import PoisonedProgram  # noqa: E402
from tests.runtime.launches import Launches, as_captured, over_program  # noqa: E402

ROWS, BLOCK_SIZE, EACH, MAX_TOKENS = 4, 16, 3, 64
WATCHED = 1
PROMPT = [3 + 11 * i % 150 for i in range(17)]  # its last chunk has one token
CUTS = (16, 1, 1, 1)  # tokens of the watched row in each launch: its prompt in two chunks, and two decode steps
CONFIG = gpu_chain.small_config(
    architecture="Qwen3ForCausalLM", intermediate_size=64, max_position_embeddings=EACH * BLOCK_SIZE, windows=(0, 24)
)
GREEDY = SamplingParams(temperature=0.0)


class _Waits(PoisonedProgram):
    """For the device after each F."""

    def forward(self, shape: LaunchShape, *rest: object) -> None:
        super().forward(shape)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()


BUCKETS = Buckets((ROWS,), (ROWS,), (32, MAX_TOKENS), (32, MAX_TOKENS))


def stage(padded: Counter[GraphKey] | None) -> tuple[Launches, PoisonedProgram]:
    rings: RingMemory = mapped_rings(RingLayout(4, PLAN_WORDS, 8192, ROWS, 4, prompt_tokens=MAX_TOKENS), DEVICE)
    weights = gpu_chain.moved(gpu_chain.random_weights(CONFIG, torch.bfloat16), DEVICE)
    program = _Waits(
        Decoder(CONFIG, weights, TritonKernelSet()),
        rings,
        max_rows=ROWS,
        max_tokens=MAX_TOKENS,
        num_blocks=ROWS * EACH + 1,
        block_size=BLOCK_SIZE,
        context_length=EACH * BLOCK_SIZE,
    )
    program.poison_blocks(tuple(range(1, ROWS * EACH + 1)))
    run = over_program(program)
    if padded is not None:
        run = as_captured(run, BUCKETS, padded)
    return Launches(run, rings, CONFIG.vocab_size, EACH), program


def logits(others: Sequence[Mapping[int, int]], padded: Counter[GraphKey] | None = None) -> list[torch.Tensor]:
    """Of the watched row, after each launch that leaves some. others: by row slot, tokens that other rows take in each
    launch. padded: launches run in the shapes of their graphs, and are counted here."""
    launches, program = stage(padded)
    launches.begin(WATCHED, PROMPT, GREEDY)
    for slot in {slot for work in others for slot in work}:
        launches.begin(slot, [5 + (slot + 7 * i) % 150 for i in range(20 + slot)], GREEDY)
    found = []
    for count, work in zip(CUTS, others, strict=True):
        launches.launch({WATCHED: count, **work})
        found.append(program._logits[WATCHED].cpu().clone())
    found = found[1:]  # the first chunk of its prompt leaves none
    assert all(bool(torch.isfinite(one).all()) and len(one.unique()) > 10 for one in found)
    return found


OTHERS = {
    "beside a row that decodes": [{0: 20}, {0: 1}, {0: 1}, {0: 1}],
    "beside prompts that begin later": [{}, {0: 20}, {0: 1, 2: 22}, {2: 1}],
    "beside prompts in chunks": [{3: 7}, {3: 7, 2: 1}, {2: 10}, {2: 30, 3: 30}],
}
# In the shapes of graphs all of them; without these one, which has a row that decodes and prompts beside it.
LAUNCHED_OFTEN = "beside prompts that begin later"


@pytest.mark.parametrize(
    ("others", "in_graphs"),
    [
        pytest.param(
            others,
            padded,
            id=f"{'padded' if padded else 'launched'}-{name}",
            marks=() if padded or name == LAUNCHED_OFTEN else pytest.mark.large,
        )
        for padded in (False, True)
        for name, others in OTHERS.items()
    ],
)
def test_a_row_has_the_logits_that_it_has_alone_in_every_launch(
    others: Sequence[Mapping[int, int]], in_graphs: bool
) -> None:
    padded = Counter[GraphKey]()
    alone, found = logits([{}] * len(CUTS)), logits(others, padded if in_graphs else None)
    assert any(key.piece is Piece.MIXED for key in padded) == in_graphs
    assert [place for place, pair in enumerate(zip(found, alone, strict=True)) if not torch.equal(*pair)] == []
