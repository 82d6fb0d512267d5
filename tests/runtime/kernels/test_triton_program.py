"""A whole launch in Triton, S, apply and F, on the host device, so that no captured graph is needed: the tokens of
the reference program for the same requests."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch

from runahead.cuda_graphs.device import LaunchShape
from runahead.cuda_graphs.enqueue_watch import unwatched
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = pytest.mark.timeout(600)  # a whole engine in Triton's interpreter takes its time

from runahead.cuda_graphs.host_device import HostDevice  # noqa: E402
from runahead.cuda_graphs.rings import RingMemory, allocate_rings  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.models.config.model_config import ModelConfig  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from tests.gpu import gpu_chain  # noqa: E402
from tests.runtime.kernels.poisoned_program import PoisonedProgram  # noqa: E402

MAX_ROWS = 5
NUM_BLOCKS = 40
REQUESTS = 9
MAX_TOKENS = 40 if DEVICE.type == "cuda" else 12  # of a request; those of the random ones go up to 40


QWEN3 = gpu_chain.small_config(
    max_position_embeddings=96, architecture="Qwen3ForCausalLM", num_layers=gpu_chain.LAYERS,
    windows=(0, 24)[-gpu_chain.LAYERS :],
)  # fmt: skip


def eager_engine(run_ahead: int, config: ModelConfig = QWEN3, snapshots: int = 0) -> gpu_chain.EngineUnderTest:
    """Triton kernels launched one by one from the host device's thread. Blocks and state slots hold NaN."""
    layout = gpu_chain.layout_for(run_ahead, MAX_ROWS)
    rings: RingMemory
    if DEVICE.type == "cuda":
        from runahead.cuda_graphs.cuda_device import allocate_mapped_rings

        rings = allocate_mapped_rings(layout)
    else:
        rings = allocate_rings(layout)
    weights = gpu_chain.moved(gpu_chain.random_weights(config), DEVICE)
    program = _Synchronous(
        Decoder(config, weights, TritonKernelSet()),
        rings,
        max_rows=MAX_ROWS,
        max_tokens=MAX_ROWS + gpu_chain.MAX_PREFILL_TOKENS,
        num_blocks=NUM_BLOCKS,
        block_size=gpu_chain.BLOCK_SIZE,
        context_length=config.max_position_embeddings,
        penalty_slots=gpu_chain.PENALTY_SLOTS,
        snapshots=snapshots,
        snapshot_tokens=gpu_chain.SNAPSHOT_TOKENS,
    )
    program.poison_blocks(tuple(range(1, NUM_BLOCKS)))
    for slot in range(MAX_ROWS + snapshots):
        program.poison_state_slot(slot)
    host = HostDevice(program, rings)
    return gpu_chain.engine_over(config, host, program, run_ahead, MAX_ROWS, NUM_BLOCKS, snapshots=snapshots)


class _Synchronous(PoisonedProgram):
    """Waits for the device after each part, as the host device expects of a program."""

    def sample(self, shape: LaunchShape) -> None:
        super().sample(shape)
        self._wait()

    def forward(self, shape: LaunchShape, between: Callable[[], None] = unwatched) -> None:
        super().forward(shape, between)
        self._wait()

    def _wait(self) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()


def served(under_test: gpu_chain.EngineUnderTest, config: ModelConfig) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Tokens and finish reasons. Half way the device's rows are compared with the host's, and at the end."""
    with torch.inference_mode():
        for handle, (prompt, sampling, stopping) in enumerate(gpu_chain.random_requests(config, REQUESTS, seed=4)):
            shorter = msgspec.structs.replace(stopping, max_tokens=min(stopping.max_tokens, MAX_TOKENS))
            under_test.submit(handle, prompt[:60], sampling, shorter)
        while len(under_test.tokens()) < REQUESTS // 2:
            under_test.engine.turn()
        under_test.engine.drain("test")
        assert any(under_test.engine.scheduler.holdings.by_slot), "nobody had a row when they were compared"
        under_test.run()
    under_test.device.close()
    return under_test.tokens(), under_test.reasons()


@pytest.mark.parametrize("run_ahead", [2, *(pytest.param(depth, marks=pytest.mark.large) for depth in (0, 1, 3, 4))])
def test_the_tokens_of_the_reference_for_rows_of_every_kind(run_ahead: int) -> None:
    weights = gpu_chain.random_weights(QWEN3)
    expected = served(gpu_chain.cpu_engine(QWEN3, weights, 2, max_rows=MAX_ROWS, num_blocks=NUM_BLOCKS), QWEN3)
    assert served(eager_engine(run_ahead), QWEN3) == expected
    assert len(expected[1]) == REQUESTS
