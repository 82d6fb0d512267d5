"""A real model on the CPU: what F says of finite rows and of prompts, and penalties from launch to launch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from runahead.cuda_graphs.rings import NON_FINITE, STOPPED, RingLayout, allocate_rings
from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.load import load_model
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.programs.cpu import sampler
from runahead.runtime.programs.cpu.program import HostProgram
from runahead.runtime.wire.parameters import SamplingParams
from tests.runtime.launches import Launches, PromptEntry, over_program
from tests.runtime.models.checkpoints import CASES, save

pytestmark = pytest.mark.usefixtures("without_gradients")

VOCAB, ROWS, BLOCK, EACH = 160, 6, 16, 8
GREEDY = SamplingParams(temperature=0.0)
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, PreTrainedModel]:
    folder: Path = tmp_path_factory.mktemp("llama")
    oracle = save(CASES[0], folder)
    return load_model(open_checkpoint(folder), torch.device("cpu"), torch.float32, "auto", ReferenceKernels()), oracle


def started(model: Decoder) -> tuple[HostProgram, Launches]:
    """Every KV block is NaN at the start."""
    rings = allocate_rings(RingLayout(4, PLAN_WORDS, 8192, ROWS, 4, prompt_tokens=200))
    num_blocks = ROWS * EACH + 1
    program = HostProgram(
        model,
        rings,
        max_rows=ROWS,
        num_blocks=num_blocks,
        block_size=BLOCK,
        context_length=EACH * BLOCK,
        penalty_slots=3,
    )
    program.poison_blocks(tuple(range(1, num_blocks)))
    for slot in range(4):
        program.poison_penalty_slot(slot)
    return program, Launches(over_program(program), rings, VOCAB, EACH)


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB, length).tolist()


# ---------------------------------------------------------------- prompt log-probabilities


def prompt_entries(model: Decoder, prompt: list[int], cuts: list[int], neighbours: int) -> list[PromptEntry]:
    """Of a prompt in slot 3, cut at these places, beside so many other rows that begin and decode."""
    _, launches = started(model)
    others = [0, 1, 2, 4, 5][:neighbours]
    for slot in others:
        asked = SamplingParams(temperature=0.0, prompt_logprobs=slot % 3 - 1)
        launches.begin(slot, prompt_of(20 + 5 * slot, seed=slot), asked)
    launches.begin(3, prompt, SamplingParams(temperature=0.0, prompt_logprobs=3))
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
        found += launches.launch({3: end - start, **dict.fromkeys(others, 7)}).prompt[3]
    return found


PROMPT = prompt_of(90, seed=11)


def test_prompt_log_probabilities_are_those_of_transformers(models: tuple[Decoder, PreTrainedModel]) -> None:
    ours, oracle = models
    found = prompt_entries(ours, PROMPT, [40], neighbours=3)
    expected = torch.log_softmax(oracle(torch.tensor([PROMPT])).logits[0], dim=1)
    assert len(found) == len(PROMPT) - 1
    for place, entry in enumerate(found):
        values, ids = expected[place].topk(3)
        assert entry.logprob == pytest.approx(float(expected[place, PROMPT[place + 1]]), abs=1e-4)
        assert entry.top == pytest.approx(values.tolist(), abs=1e-4)
        assert entry.top_ids == tuple(ids.tolist())


@pytest.mark.parametrize("neighbours", [0, 2, 5])
@pytest.mark.parametrize("cuts", [[], [1], [33, 64], [16, 17, 50, 89]], ids=str)
def test_prompt_log_probabilities_have_the_same_bits_whatever_the_chunks_and_neighbours(
    models: tuple[Decoder, PreTrainedModel], cuts: list[int], neighbours: int
) -> None:
    assert prompt_entries(models[0], PROMPT, cuts, neighbours) == prompt_entries(models[0], PROMPT, [48], 1)


def test_logits_of_a_prompt_are_made_in_tiles_whose_size_changes_no_bit(
    models: tuple[Decoder, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models[0]
    made: list[int] = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        made.append(hidden.shape[0])
        return Decoder.own_logits(model, hidden)

    monkeypatch.setattr(model, "own_logits", logits)
    expected = prompt_entries(model, PROMPT, [], neighbours=0)
    assert sum(made) == len(PROMPT)  # one of them for the row's first token
    assert max(made) == 32
    monkeypatch.setattr(sampler, "_TILE", 7)
    assert prompt_entries(model, PROMPT, [], neighbours=0) == expected


def test_a_launch_in_which_nobody_asks_leaves_nothing(models: tuple[Decoder, PreTrainedModel]) -> None:
    _, launches = started(models[0])
    launches.rings.prompt_logprob[:] = 7.0
    launches.begin(0, PROMPT, GREEDY)
    launches.launch({0: 50})
    assert (launches.rings.prompt_logprob == 7.0).all()


def test_query_tokens_that_are_not_finite_leave_zeros(models: tuple[Decoder, PreTrainedModel]) -> None:
    program, launches = started(models[0])
    launches.begin(0, PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=1))
    launches.launch({0: 32})
    program.poison_blocks((int(program.rows.block_table[0, 1]),))
    outcome = launches.launch({0: 10})
    assert outcome.prompt[0] == [PromptEntry(0.0, (0,), (0.0,))] * 10
    assert outcome.finite == {0: False}


# ---------------------------------------------------------------- finite flags


def test_a_nan_in_one_row_s_cache_shows_in_its_own_flag_only(models: tuple[Decoder, PreTrainedModel]) -> None:
    program, launches = started(models[0])
    for slot in (0, 1, 2, 4):
        launches.begin(slot, prompt_of(40, slot), GREEDY)
    outcome = launches.launch({0: 40, 1: 40, 2: 20, 4: 20})
    assert outcome.finite == {0: True, 1: True, 2: True, 4: True}
    for slot in (1, 2):
        program.poison_blocks((int(program.rows.block_table[slot, 0]),))
    outcome = launches.launch({0: 1, 1: 1, 2: 20, 4: 20})
    assert outcome.finite == {0: True, 1: False, 2: False, 4: True}, "a decode row, and a chunk"
    outcome = launches.launch({0: 1, 1: 1, 2: 1, 4: 1})
    assert outcome.flags == {0: 0, 1: NON_FINITE | STOPPED, 2: NON_FINITE | STOPPED, 4: 0}
    assert outcome.finite == {0: True, 1: True, 2: True, 4: True}, "rows that S has ended are masked"


# ---------------------------------------------------------------- penalties


def penalised_tokens(oracle: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens from transformers' logits, with the penalties written out."""
    said: list[int] = []
    for _ in range(count):
        x = oracle(torch.tensor([prompt + said])).logits[0, -1].double().numpy().copy()
        known = sorted({*prompt, *said})
        x[known] = np.where(x[known] > 0, x[known] / 1.3, x[known] * 1.3)
        for token in said:
            x[token] -= 0.25
        x[sorted(set(said))] -= 0.5
        said.append(int(x.argmax()))
    return said


def test_tokens_under_penalties_are_those_of_transformers_logits(models: tuple[Decoder, PreTrainedModel]) -> None:
    ours, oracle = models
    _, launches = started(ours)
    prompts = {slot: prompt_of(10 + 9 * slot, seed=20 + slot) for slot in (0, 2, 5)}
    for penalty_slot, slot in enumerate(prompts):
        launches.begin(slot, prompts[slot], PENALISED, penalty_slot=penalty_slot)
    launches.begin(3, prompts[2], GREEDY)
    launches.launch({0: 100, 2: 30, 3: 100, 5: 30})
    launches.launch({0: 1, 2: 1, 5: 100})
    launches.launch({0: 1, 2: 1, 5: 1})
    found = launches.decode([0, 2, 5], 24)
    for slot, prompt in prompts.items():
        expected = penalised_tokens(oracle, prompt, 26)
        before = 1 if slot == 5 else 2  # tokens of the launches in which the prompt of slot 5 was not done
        assert found[slot] == expected[before : before + 24]
        assert len(set(expected)) > 8


def test_an_evicted_row_says_the_same_from_another_slot_that_somebody_else_had(
    models: tuple[Decoder, PreTrainedModel],
) -> None:
    ours, _ = models
    prompt = prompt_of(30, seed=31)
    _, launches = started(ours)
    launches.begin(0, prompt, PENALISED, penalty_slot=1)
    launches.launch({0: 100})
    undisturbed = launches.decode([0], 20)[0]
    _, launches = started(ours)
    launches.begin(0, prompt, PENALISED, penalty_slot=1)
    launches.begin(1, prompt_of(50, seed=32), PENALISED, penalty_slot=2)
    launches.launch({0: 100, 1: 100})
    first = launches.decode([0, 1], 8)[0]
    launches.launch({})
    launches.begin(1, prompt, PENALISED, said=first, penalty_slot=2)  # evicted, and admitted where another row was
    launches.launch({1: 20})
    launches.launch({1: 100})
    assert first + launches.decode([1], 12)[1] == undisturbed
