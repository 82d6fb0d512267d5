"""An engine some of whose rows have grammars, their masks late by a seed: over Triton kernels that are launched one by
one, or over the reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from runahead.cuda_graphs.host_device import HostDevice
from runahead.cuda_graphs.rings import allocate_rings
from runahead.runtime.drafters.ngram import Drafter, NgramDrafter
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
from runahead.runtime.masks.masks import GivenUp
from runahead.runtime.models.blocks.dense import DenseConfig
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.programs.cpu.program import HostProgram
from runahead.runtime.programs.cuda.draft_head import TritonHead
from runahead.runtime.scheduler.drafts import DraftChoice
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.gpu import gpu_chain
from tests.runtime.kernels.drafted_engine import SynchronousProgram, TokensAndLogprobs
from tests.runtime.kernels.shaped_heads import heads_like
from tests.runtime.late_masks import LateMasks, MadeUpMatcher
from tests.runtime.programs.hash_model import EOS, VOCAB

NUM_BLOCKS = 60
Asked = tuple[list[int], SamplingParams, StoppingParams, str]  # the last: a grammar, or none
GRAMMARS = ("any 9", "", "some 12", "", "one 5", "nothing 4", "", "any 14")


class LaggingMasks(LateMasks):
    """Every second order or so is carried out when `lag` more launches have been committed than when it came: S looks
    in vain meanwhile. lag: 0: none comes late. drafts, drafter: as of `LateMasks`."""

    def __init__(self, max_rows: int, lag: int, drafts: int = 0, drafter: Drafter | None = None) -> None:
        super().__init__(max_rows, 0, drafts, drafter)
        self.committed: Callable[[], int] = lambda: 0
        self._lag = lag
        self._due: deque[int] = deque()

    def given_up(self, now: float) -> Sequence[GivenUp]:
        while self._due and self._due[0] <= self.committed():
            self._due.popleft()
            self._orders.popleft()()
            while self._compiling:
                grammar = self._compiling.popleft()
                self._rows.compiled(grammar, MadeUpMatcher(grammar), 0)
        return ()

    def _add(self, order: Callable[..., None], *said: Any) -> None:
        super()._add(order, *said)
        self._due.append(self.committed() + self._lag * (len(self._due) % 2 == 0))


def masked_config() -> DenseConfig:
    """With the vocabulary of the made-up grammars."""
    return gpu_chain.small_config(
        max_position_embeddings=96, architecture="Qwen3ForCausalLM", num_layers=gpu_chain.LAYERS,
        windows=(0, 24)[-gpu_chain.LAYERS :], intermediate_size=64, vocab_size=VOCAB, eos_token_ids=(EOS,),
    )  # fmt: skip


def lagging_masks(
    max_rows: int, lag: int, drafts: DraftChoice | None = None, forced: int = 0, has_head: bool = False
) -> LaggingMasks:
    """Who makes them. drafts, forced, has_head: as `masked_engine`'s."""
    if drafts is None or has_head:  # a head guesses nothing of rows with a grammar
        return LaggingMasks(max_rows, lag, max(0 if drafts is None else drafts.most, forced))
    drafter = NgramDrafter(max_rows, masked_config().max_position_embeddings)
    return LaggingMasks(max_rows, lag, max(drafts.most, forced), drafter)


def masked_engine(
    device: torch.device, run_ahead: int, max_rows: int, lag: int, *, drafts: DraftChoice | None = None,
    forced: int = 0, has_head: bool = False,
) -> gpu_chain.EngineUnderTest:  # fmt: skip
    """lag: of `LaggingMasks`. drafts: of `ngram`, in each launch whose rows all decode. forced: of
    a row with a grammar in such a launch, where its grammar forces them. has_head: drafts are those of a random head,
    in the place of `ngram`. Free KV blocks are NaN at the start."""
    config, masks = masked_config(), lagging_masks(max_rows, lag, drafts, forced, has_head)
    layout = gpu_chain.layout_for(run_ahead, max_rows, masks.memory.drafts)
    draft_rows = max_rows if masks.memory.drafts else 0
    if device.type == "cuda":
        from runahead.cuda_graphs.cuda_device import allocate_mapped_rings

        rings = allocate_mapped_rings(layout)
    else:
        rings = allocate_rings(layout)
    weights = gpu_chain.moved(gpu_chain.random_weights(config), device)
    model = Decoder(config, weights, TritonKernelSet())
    program = SynchronousProgram(
        model,
        rings,
        max_rows=max_rows,
        max_tokens=max_rows + gpu_chain.MAX_PREFILL_TOKENS,
        num_blocks=NUM_BLOCKS,
        block_size=gpu_chain.BLOCK_SIZE,
        context_length=config.max_position_embeddings,
        penalty_slots=gpu_chain.PENALTY_SLOTS,
        drafts=0 if drafts is None else drafts.most,
        draft_rows=draft_rows,
        masks=masks.memory,
        head=random_head(model) if has_head else None,
    )
    program.poison_blocks(tuple(range(1, NUM_BLOCKS)))
    under_test = gpu_chain.engine_over(
        config, HostDevice(program, rings), program, run_ahead, max_rows, NUM_BLOCKS, drafts=drafts,
        draft_rows=draft_rows, masks=masks, forced=masks.memory.drafts, looks_up=not has_head,
    )  # fmt: skip
    masks.committed = lambda: under_test.engine.ledger.committed
    return under_test


def random_head(model: Decoder) -> TritonHead:
    """Of EAGLE-1, in the model's dtype, which is hardly ever right."""
    dice = torch.Generator(device=model.device).manual_seed(4)

    def matrix(outputs: int, depth: int) -> torch.Tensor:
        numbers = torch.randn((outputs, depth), generator=dice, device=model.device) * depth**-0.5
        return numbers.to(model.dtype)

    return TritonHead(heads_like(model, matrix)["eagle-1"], model, model.config.max_position_embeddings)


def reference_engine(run_ahead: int, max_rows: int) -> gpu_chain.EngineUnderTest:
    """By the reference, every mask in time."""
    config, masks = masked_config(), LateMasks(max_rows, None)
    rings = allocate_rings(gpu_chain.layout_for(run_ahead, max_rows))
    program = HostProgram(
        Decoder(config, gpu_chain.random_weights(config), ReferenceKernels()),
        rings,
        max_rows=max_rows,
        num_blocks=NUM_BLOCKS,
        block_size=gpu_chain.BLOCK_SIZE,
        context_length=config.max_position_embeddings,
        penalty_slots=gpu_chain.PENALTY_SLOTS,
        masks=masks.memory,
    )
    return gpu_chain.engine_over(
        config, HostDevice(program, rings), program, run_ahead, max_rows, NUM_BLOCKS, masks=masks
    )


def requests(count: int) -> list[Asked]:
    """Requests of every kind, most with a grammar."""
    made = []
    for index, (prompt, sampling, stopping) in enumerate(gpu_chain.random_requests(masked_config(), count, seed=11)):
        changes = {"repetition_penalty": 1.2, "frequency_penalty": 0.3} if index % 3 == 1 else {}
        short = StoppingParams(max_tokens=4 + stopping.max_tokens % 9, min_tokens=stopping.min_tokens)
        drawn = msgspec.structs.replace(sampling, **changes)
        made.append((prompt[:50], drawn, short, GRAMMARS[index % len(GRAMMARS)]))
    return made


def long_requests() -> list[Asked]:
    """As many as there are rows, whose grammars force much: few launches have a prompt beside them, so that most may
    have drafts."""
    made = []
    for index, grammar in enumerate(("some 18", "one 13", "", "nothing 9")):
        chosen = {"repetition_penalty": 1.2, "frequency_penalty": 0.3} if index == 0 else {"logprobs": 2}
        drawn = SamplingParams(temperature=0.0 if index == 1 else 0.9, seed=7 + index, **chosen)
        prompt = [3 + index, 9, 4 + index, 8] * 3
        made.append((prompt, drawn, StoppingParams(max_tokens=15), grammar))
    return made


def served(under_test: gpu_chain.EngineUnderTest, asked: Sequence[Asked]) -> TokensAndLogprobs:
    """Tokens, finish reasons, and log-probabilities, by handle. Half way the device's rows are compared with the
    host's."""
    with torch.inference_mode():
        for handle, (prompt, sampling, stopping, structure) in enumerate(asked):
            under_test.submit(handle, prompt, sampling, stopping, structure)
        while len(under_test.tokens()) < len(asked) // 2:
            under_test.engine.turn()
        under_test.engine.drain("test")
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
