"""An engine over Triton kernels that are launched one by one, with drafts whose number changes with the launch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.cuda_graphs.device import LaunchShape
from runahead.cuda_graphs.enqueue_watch import unwatched
from runahead.cuda_graphs.host_device import HostDevice
from runahead.cuda_graphs.rings import allocate_rings
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.row_record import token_mask
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.gpu import gpu_chain
from tests.runtime.kernels.poisoned_program import PoisonedProgram

NUM_BLOCKS = 60
TokensAndLogprobs = tuple[
    dict[int, list[int]], dict[int, int], dict[int, list[tuple[float, tuple[int, ...], tuple[float, ...]]]]
]


class ChangingForms:
    """A `DraftChoice` by the launch's number: a stretch of each form, the same at every depth."""

    most = 7

    def drafts(self, number: int, rows: int) -> int:
        return (7, 3, 3, 1, 7, 0, 0, 3)[number // 2 % 8]

    def stays_until(self, number: int) -> int:
        return number

    def learn(self, number: int, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        pass


class SynchronousProgram(PoisonedProgram):
    """Waits for the device after each part, as the host device expects of a program."""

    def sample(self, shape: LaunchShape) -> None:
        super().sample(shape)
        self._wait()

    def forward(self, shape: LaunchShape, between: Callable[[], None] = unwatched) -> None:
        super().forward(shape, between)
        self._wait()

    def _wait(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()


def drafted_engine(
    config: ModelConfig, device: torch.device, run_ahead: int, max_rows: int, *, drafts: bool,
    dtype: torch.dtype = torch.float32, snapshots: int = 0,
) -> gpu_chain.EngineUnderTest:  # fmt: skip
    """drafts: launches of up to max_rows - 1 rows have some. snapshots: of states, that there is room for. Free KV
    blocks and state slots are NaN at the start."""
    choice = ChangingForms() if drafts else None
    most, draft_rows = (ChangingForms.most, max_rows - 1) if drafts else (0, 0)
    layout = gpu_chain.layout_for(run_ahead, max_rows, most)
    if device.type == "cuda":
        from runahead.cuda_graphs.cuda_device import allocate_mapped_rings

        rings = allocate_mapped_rings(layout)
    else:
        rings = allocate_rings(layout)
    weights = gpu_chain.moved(gpu_chain.random_weights(config, dtype), device)
    program = SynchronousProgram(
        Decoder(config, weights, TritonKernelSet()),
        rings,
        max_rows=max_rows,
        max_tokens=max_rows + gpu_chain.MAX_PREFILL_TOKENS,
        num_blocks=NUM_BLOCKS,
        block_size=gpu_chain.BLOCK_SIZE,
        context_length=config.max_position_embeddings,
        penalty_slots=gpu_chain.PENALTY_SLOTS,
        drafts=most,
        draft_rows=draft_rows,
        snapshots=snapshots,
        snapshot_tokens=gpu_chain.SNAPSHOT_TOKENS,
    )
    program.poison_blocks(tuple(range(1, NUM_BLOCKS)))
    for slot in range(max_rows + snapshots):
        program.poison_state_slot(slot)
    return gpu_chain.engine_over(
        config, HostDevice(program, rings), program, run_ahead, max_rows, NUM_BLOCKS, drafts=choice,
        draft_rows=draft_rows, snapshots=snapshots,
    )  # fmt: skip


def requests(
    config: ModelConfig, count: int, few: bool = False
) -> list[tuple[list[int], SamplingParams, StoppingParams]]:
    """Requests of every kind whose prompts repeat themselves, so that drafts are right now and then; two have
    penalties. few: each may say two tokens alone, as models need that do not repeat themselves."""
    made = []
    for index, (prompt, sampling, stopping) in enumerate(gpu_chain.random_requests(config, count, seed=7)):
        fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
        if index % 3 == 1:
            fields |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
        if index % 3 == 0:
            fields["temperature"] = 0.0  # a small random model then soon says the same again and again
        elif index % 3 == 2:
            fields |= {"temperature": 0.05, "logprobs": 2}
        if few:
            fields["allowed_mask"] = token_mask(range(3, 5), config.vocab_size).tobytes()
        stopping = StoppingParams(
            max_tokens=10 + stopping.max_tokens % 16,
            min_tokens=stopping.min_tokens,
            stop_token_ids=stopping.stop_token_ids,
        )
        made.append(((prompt[:5] * 8)[: 20 + 5 * index], SamplingParams(**fields), stopping))
    return made


def served(
    under_test: gpu_chain.EngineUnderTest, config: ModelConfig, count: int, few: bool = False
) -> TokensAndLogprobs:
    """Tokens, finish reasons, and log-probabilities, by handle. Half way the device's rows are compared
    with the host's, what the drafter knows too."""
    with torch.inference_mode():
        for handle, (prompt, sampling, stopping) in enumerate(requests(config, count, few)):
            under_test.submit(handle, prompt, sampling, stopping)
        while len(under_test.tokens()) < count // 2:
            under_test.engine.turn()
        under_test.engine.drain("test")
        assert any(under_test.engine.scheduler.holdings.by_slot), "nobody had a row when they were compared"
        under_test.run()
        under_test.engine.drain("test")
    under_test.device.close()
    logprobs: dict[int, list[tuple[float, tuple[int, ...], tuple[float, ...]]]] = {}
    for _, message in under_test.links.sent:
        if isinstance(message, m.Output):
            handles = np.frombuffer(message.handles, np.int64)
            for one in message.logprobs:
                found = one.chosen, one.top_ids, one.top_logprobs
                logprobs.setdefault(int(handles[one.index]), []).append(found)
    return under_test.tokens(), under_test.reasons(), logprobs
