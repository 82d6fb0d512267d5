"""A launch's memory is free as soon as it has been enqueued: no cycle of references keeps tensors until the garbage
collector runs, which the pool's size would have to allow for."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = [
    pytest.mark.timeout(600),
    # The interpreter's own way with a loop whose length is read on the device.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams  # noqa: E402
from tests.gpu import gpu_chain  # noqa: E402
from tests.runtime.kernels.hybrid_configs import HYBRIDS, hybrid  # noqa: E402
from tests.runtime.kernels.test_triton_decode_streams import (  # noqa: E402
    BLOCK_SIZE,
    BLOCKS_A_ROW,
    batch_of,
    decoder,
    ragged_batch,
)
from tests.runtime.kernels.test_triton_program import eager_engine  # noqa: E402


@contextlib.contextmanager
def left_to_the_collector() -> Iterator[list[torch.Tensor]]:
    """Yields a list that afterwards holds the tensors which only the garbage collector would have freed."""
    left: list[torch.Tensor] = []
    gc.collect()
    gc.disable()
    try:
        yield left
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left += [one for one in gc.garbage if isinstance(one, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def shapes(tensors: list[torch.Tensor]) -> list[tuple[int, ...]]:
    return sorted({tuple(one.shape) for one in tensors})


def test_no_tensor_of_a_launch_is_left_to_the_garbage_collector() -> None:
    config = gpu_chain.small_config(architecture="LlamaForCausalLM", windows=(0, 24), intermediate_size=128)
    model = decoder(config, TritonKernelSet(), torch.bfloat16)
    cache = model.make_cache(5 * BLOCKS_A_ROW + 1, BLOCK_SIZE)
    batches = [
        ragged_batch([33, 21], [33, 21], [False] * 2, DEVICE),
        ragged_batch([33, 21, 17, 0, 28], [1, 9, 1, 1, 1], [True, False, False, True, True], DEVICE),
        batch_of([34, 22, 18], 1, DEVICE),
        batch_of([35], 1, DEVICE),
    ]
    for batch in batches:
        with left_to_the_collector() as left:
            model.forward(batch, cache)
        assert not shapes(left), batch


@pytest.mark.parametrize("name", HYBRIDS)
def test_nor_of_a_hybrid_models_launches(name: str) -> None:
    """Prompts in chunks beside rows that decode, then decode rows alone, several and one."""
    under_test = eager_engine(2, hybrid(name, max_position_embeddings=96))
    with torch.inference_mode(), left_to_the_collector() as left:
        for handle, length in enumerate((33, 5, 20)):
            prompt = [(5 * handle + 3 * place) % 150 + 2 for place in range(length)]
            under_test.submit(handle, prompt, SamplingParams(temperature=0.0), StoppingParams(max_tokens=2 + handle))
        under_test.run()
    under_test.device.close()
    assert not shapes(left)
