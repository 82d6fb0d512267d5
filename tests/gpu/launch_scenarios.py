"""Scenes of launches by hand, played on the reference program and on whatever is compared with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from runahead.cuda_graphs.device import Form
from runahead.cuda_graphs.rings import RingLayout, RingMemory, allocate_rings
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.programs.cpu.program import HostProgram
from runahead.runtime.wire.parameters import SamplingParams
from tests.gpu import gpu_chain
from tests.runtime.launches import Launches, Outcome, PromptEntry, over_program

if TYPE_CHECKING:  # Triton's kernels are imported where they run
    from tests.runtime.kernels.poisoned_program import PoisonedProgram

ROWS, BLOCK_SIZE, EACH, PENALTY_SLOTS, MAX_TOKENS = 5, 16, 6, 3, 128
NUM_BLOCKS = ROWS * EACH + 1
CONTEXT = EACH * BLOCK_SIZE
LAYOUT = RingLayout(4, PLAN_WORDS, 8192, ROWS, 4, prompt_tokens=MAX_TOKENS)
CONFIG: ModelConfig = gpu_chain.small_config(
    max_position_embeddings=CONTEXT, architecture="Qwen3ForCausalLM", num_layers=gpu_chain.LAYERS,
    windows=(0,) * gpu_chain.LAYERS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stage:
    """Launches on a program, and what a test does to its memory between two of them."""

    launches: Launches
    poison_blocks: Callable[[tuple[int, ...]], None]
    poison_penalty_slot: Callable[[int], None]
    list_samples: Callable[[Sequence[int]], None]  # row slots that the device's next S samples, in place of its own

    def sample_next(self, slots: Sequence[int]) -> None:
        """The next S samples these rows, whoever was in the last F; their logits are those of their own last F."""
        self.list_samples(slots)
        self.launches.sample_next(slots)

    def poison_first_block(self, slot: int) -> None:
        self.poison_blocks((1 + slot * EACH,))

    def spoil(self) -> Stage:
        """Nothing is in the cache or a penalty slot that a row may read before it has written it."""
        self.poison_blocks(tuple(range(1, NUM_BLOCKS)))
        for slot in range(PENALTY_SLOTS + 1):
            self.poison_penalty_slot(slot)
        return self


MakeStage = Callable[[], Stage]


def make_launches(run: Callable[..., None], rings: RingMemory) -> Launches:
    return Launches(run, rings, CONFIG.vocab_size, EACH)


def reference_stage() -> Stage:
    """The reference program on the CPU."""
    rings = allocate_rings(LAYOUT)
    program = HostProgram(
        Decoder(CONFIG, gpu_chain.random_weights(CONFIG), ReferenceKernels()),
        rings,
        max_rows=ROWS,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        context_length=CONTEXT,
        penalty_slots=PENALTY_SLOTS,
    )

    def list_samples(slots: Sequence[int]) -> None:
        program.rows.rows = np.array(slots, np.int64)
        program.rows.samples = np.ones(len(slots), np.bool_)

    launches = make_launches(over_program(program), rings)
    return Stage(launches, program.poison_blocks, program.poison_penalty_slot, list_samples).spoil()


def lists_samples_of(program: PoisonedProgram) -> Callable[[Sequence[int]], None]:
    """As `Stage.list_samples`, of a program that Triton's kernels run. It waits for the GPU."""

    def list_samples(slots: Sequence[int]) -> None:
        listed = program.rows.rows.sample_slots
        listed.fill_(ROWS)  # the null slot
        listed[: len(slots)] = torch.tensor(slots, dtype=listed.dtype, device=listed.device)
        if listed.is_cuda:
            torch.cuda.synchronize()

    return list_samples


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, CONFIG.vocab_size, length).tolist()


def penalised(stage: Stage) -> dict[str, list[int]]:
    """Tokens of rows with penalties among rows without, one of which is evicted and comes back elsewhere."""
    launches = stage.launches
    greedy = SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2)
    drawn = SamplingParams(temperature=0.9, top_k=40, seed=7, frequency_penalty=0.8, bias_ids=(5,), bias_values=(1.0,))
    launches.begin(0, prompt_of(21, 1), greedy, penalty_slot=2)
    launches.begin(1, prompt_of(21, 1), SamplingParams(temperature=0.0))
    launches.begin(3, prompt_of(33, 2), drawn, penalty_slot=0)
    launches.launch({0: 100, 1: 100, 3: 16})
    opening = [launches.launch({0: 1, 1: 1, 3: 100}).tokens[0]]
    first = launches.decode([0, 1, 3], 5)
    said = [*opening, *first[0], launches.launch({}).tokens[0]]
    stage.poison_penalty_slot(2)
    launches.begin(4, prompt_of(21, 1), greedy, said=said, penalty_slot=2)
    launches.begin(2, prompt_of(9, 3), greedy, penalty_slot=1)
    launches.launch({2: 100, 4: 100})
    later = launches.decode([2, 4], 5)
    return {"penalised": said, "free": first[1], "drawn": first[3], "evicted": later[4], "beside it": later[2]}


def held_back(stage: Stage, decodes: int) -> dict[int, int]:
    """Tokens of rows 4 and 1, which their S holds back until as many launches of others are over: none, and the others'
    prompts, and their decode launches."""
    launches = stage.launches
    for slot in (1, 4):
        launches.begin(slot, prompt_of(20 + slot, slot), SamplingParams(temperature=0.3, seed=slot))
    launches.launch({1: 100, 4: 100})
    if decodes:
        for slot in (0, 2, 3):
            launches.begin(slot, prompt_of(12, 7 + slot), SamplingParams(temperature=0.0))
        stage.sample_next([])
        launches.launch({0: 100, 2: 100, 3: 100})
        launches.decode([0, 2, 3], decodes, Form.PLAIN)
        stage.sample_next([4, 1])
    return launches.launch({}).tokens


def flags(stage: Stage) -> list[Outcome]:
    """A NaN comes into the cache of a decode row, then of a chunk, and their rows end."""
    launches = stage.launches
    for slot in (0, 1, 2, 4):
        launches.begin(slot, prompt_of(30, slot), SamplingParams(temperature=0.0))
    outcomes = [launches.launch({0: 100, 1: 100, 2: 16, 4: 16})]
    stage.poison_first_block(1)
    outcomes.append(launches.launch({0: 1, 1: 1}))
    stage.poison_first_block(2)
    outcomes.append(launches.launch({0: 1, 1: 1, 2: 10, 4: 10}))
    outcomes.append(launches.launch({0: 1, 1: 1, 2: 100, 4: 100}))
    outcomes.append(launches.launch({0: 1, 1: 1, 2: 1, 4: 1}))
    return outcomes


def flags_are_right(outcomes: list[Outcome]) -> None:
    """What `flags` must have found."""
    assert [outcome.finite for outcome in outcomes] == [
        {0: True, 1: True, 2: True, 4: True},
        {0: True, 1: False},
        {0: True, 1: True, 2: False, 4: True},  # S has ended row 1: it is masked
        {0: True, 1: True, 2: False, 4: True},
        {0: True, 1: True, 2: True, 4: True},
    ]
    assert all(not outcome.flags.get(0) and not outcome.flags.get(4) for outcome in outcomes)


PROMPT = prompt_of(75, 11)


def prompt_entries(stage: Stage, cuts: list[int], neighbours: tuple[int, ...]) -> list[PromptEntry]:
    """Of a prompt in slot 3, cut at these places, beside rows that begin and decode, some of which ask too."""
    launches = stage.launches
    for slot in neighbours:
        asked = SamplingParams(temperature=0.0, prompt_logprobs=slot % 3 - 1)
        launches.begin(slot, prompt_of(11 + 5 * slot, slot), asked)
    launches.begin(3, PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=3))
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(PROMPT)], strict=True):
        found += launches.launch({3: end - start, **dict.fromkeys(neighbours, 7)}).prompt[3]
    return found


def entries_agree(found: list[PromptEntry], expected: list[PromptEntry], tolerance: float) -> None:
    """The same most likely tokens, log-probabilities within `tolerance`."""
    assert len(found) == len(expected) == len(PROMPT) - 1
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert abs(ours.logprob - theirs.logprob) <= tolerance, (place, ours, theirs)
        assert np.abs(np.subtract(ours.top, theirs.top)).max() <= tolerance, (place, ours, theirs)
        close = np.diff(theirs.top).max(initial=-1.0) > -2 * tolerance  # two tokens that rounding may exchange
        assert ours.top_ids == theirs.top_ids or close, (place, ours, theirs)
