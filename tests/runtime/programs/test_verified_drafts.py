"""A real model on the CPU with drafts: tokens, log-probabilities and ends are those without, whatever is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Form
from runahead.cuda_graphs.rings import NON_FINITE, STOPPED, VOID, RingLayout, allocate_rings
from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.drafters.ngram import NO_DRAFT, Drafter
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.memory.block_pool import NO_SLOT
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.load import load_model
from runahead.runtime.plan import PLAN_WORDS, Admission, Chunk, LaunchPlan, stage
from runahead.runtime.programs.cpu import sampler
from runahead.runtime.programs.cpu.program import HostProgram
from runahead.runtime.row_record import token_mask
from runahead.runtime.scheduler.new_row import admission_record
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.runtime.launches import ENDLESS, Cell, Launches, over_program
from tests.runtime.models.checkpoints import CASES, save

pytestmark = pytest.mark.usefixtures("without_gradients")

VOCAB, ROWS, BLOCK, EACH, MOST = 160, 4, 16, 8, 7
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.9, seed=5)
PENALISED = SamplingParams(
    temperature=0.7, seed=6, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, logprobs=2
)
KINDS = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "log-probabilities": SamplingParams(temperature=0.0, logprobs=3),
    "filtered": SamplingParams(temperature=1.2, seed=7, top_k=40, top_p=0.9, min_p=0.01, logprobs=0),
    "penalised": PENALISED,
    "penalised and greedy": SamplingParams(temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.1),
    "steered": SamplingParams(
        temperature=0.8, seed=9, bias_ids=(4, 9), bias_values=(3.0, -2.0),
        allowed_mask=token_mask(range(2, 90), VOCAB).tobytes(),
    ),
}  # fmt: skip


@dataclass
class KnowingDrafter(Drafter):
    """Proposes what a row is about to say, up to the first position that it is to miss, and there something else."""

    said: dict[int, list[int]] = field(default_factory=dict)  # by row slot: prompt and completion
    misses: frozenset[int] = frozenset()  # positions
    told: dict[int, dict[int, int]] = field(default_factory=dict)  # by row slot and position
    asked: list[int] = field(default_factory=list)

    def read(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        if start == 0:
            self.told[slot] = {}
        self.told[slot] |= dict(enumerate(tokens.tolist(), start))

    def took(self, slots: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        for slot, position, token in zip(slots.tolist(), positions.tolist(), tokens.tolist(), strict=True):
            assert position not in self.told[slot]
            self.told[slot][position] = token

    def propose(self, slots: NDArray[np.int64], lengths: NDArray[np.int64], count: int) -> NDArray[np.int32]:
        self.asked.append(count)
        lines = [self._line(slot, length, count) for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True)]
        return np.array(lines, np.int32).reshape(slots.size, count)

    def _line(self, slot: int, length: int, count: int) -> list[int]:
        known = self.said[slot][:length]
        assert [self.told[slot][place] for place in range(len(known))] == known, "it is told of every token"
        places = range(length, length + count)
        right = [self.said[slot][place] if place < len(self.said[slot]) else NO_DRAFT for place in places]
        return [
            (token + 1) % VOCAB if place in self.misses else token for place, token in zip(places, right, strict=True)
        ]

    def memory(self) -> dict[str, NDArray[np.generic]]:
        return {}

    def poison(self, slot: int) -> None:
        self.told.pop(slot, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("llama")
    save(CASES[0], folder)
    return load_model(open_checkpoint(folder), torch.device("cpu"), torch.float32, "auto", ReferenceKernels())


def started(model: Decoder, drafter: KnowingDrafter | None = None) -> tuple[HostProgram, Launches]:
    """Every KV block is NaN at the start."""
    rings = allocate_rings(RingLayout(4, PLAN_WORDS, 8192, ROWS, 4, prompt_tokens=200, drafts=MOST))
    program = HostProgram(
        model,
        rings,
        max_rows=ROWS,
        num_blocks=ROWS * EACH + 1,
        block_size=BLOCK,
        context_length=EACH * BLOCK,
        penalty_slots=3,
        drafter=drafter,
    )
    program.poison_blocks(tuple(range(1, ROWS * EACH + 1)))
    return program, Launches(over_program(program), rings, VOCAB, EACH)


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB, length).tolist()


PROMPT = prompt_of(29, seed=3)


def said(
    launches: Launches, slot: int, count: int, drafts: int | Sequence[int] = 0, form: Form = Form.FULL
) -> tuple[list[Cell], list[int]]:
    """The next tokens of a row until there are `count` of them or it has ended, and how long its runs were. drafts: of
    each launch, in a circle."""
    found: list[Cell] = []
    runs: list[int] = []
    numbers = [drafts] if isinstance(drafts, int) else list(drafts)
    while len(found) < count and not (found and found[-1].flags):
        run = launches.launch({slot: 1}, form, numbers[len(runs) % len(numbers)]).runs.get(slot, [])
        found += run
        runs.append(len(run))
    return found[:count], runs


def alone(
    model: Decoder, sampling: SamplingParams, count: int, stopping: StoppingParams = ENDLESS, max_len: int = 1 << 20,
    form: Form = Form.FULL,
) -> list[Cell]:  # fmt: skip
    """What a row says without drafts."""
    _, launches = started(model)
    begin(launches, 0, sampling, stopping, max_len)
    launches.launch({0: 100}, form)
    return said(launches, 0, count, form=form)[0]


def begin(launches: Launches, slot: int, sampling: SamplingParams, stopping: StoppingParams, max_len: int) -> None:
    penalty_slot = 1 if sampling.has_penalty else NO_SLOT
    launches.begin(slot, PROMPT, sampling, penalty_slot=penalty_slot, stopping=stopping, max_len=max_len)


def with_drafts(
    model: Decoder, sampling: SamplingParams, expected: list[Cell], drafts: int | Sequence[int], *misses: int,
    stopping: StoppingParams = ENDLESS, max_len: int = 1 << 20, form: Form = Form.FULL,
) -> tuple[list[Cell], list[int]]:  # fmt: skip
    """The same tokens with a drafter that knows them, but for the positions that it misses, counted from the prompt's
    end."""
    tokens = [*PROMPT, *(cell.token for cell in expected)]
    drafter = KnowingDrafter({0: tokens}, frozenset(len(PROMPT) + place for place in misses))
    _, launches = started(model, drafter)
    begin(launches, 0, sampling, stopping, max_len)
    launches.launch({0: 100}, form)
    return said(launches, 0, len(expected), drafts, form)


# ---------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("drafts", [1, 3, 7, (7, 0, 1), (0, 3)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_log_probabilities_are_those_without_drafts(
    model: Decoder, kind: str, drafts: int | tuple[int, ...]
) -> None:
    expected = alone(model, KINDS[kind], 40)
    found, runs = with_drafts(model, KINDS[kind], expected, drafts, 3, 4, 9, 17, 30, 31, 32)
    assert found == expected
    assert len({cell.token for cell in expected}) > 4
    assert max(runs) > 1


@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("kind", ["greedy", "drawn"])
@pytest.mark.parametrize("at_once", [0, 100])
def test_in_the_plain_form_it_is_the_same_at_once_and_in_turn(
    model: Decoder, kind: str, drafts: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "_DRAWN_AT_ONCE", at_once)
    expected = alone(model, KINDS[kind], 40, form=Form.PLAIN)
    assert with_drafts(model, KINDS[kind], expected, drafts, 3, 4, 9, 17, form=Form.PLAIN)[0] == expected


def test_all_drafts_are_kept_where_none_is_missed(model: Decoder) -> None:
    expected = alone(model, DRAWN, 33)
    assert with_drafts(model, DRAWN, expected, 7)[1] == [1, 8, 8, 8, 8]


def test_a_run_ends_with_the_token_that_was_not_the_draft(model: Decoder) -> None:
    expected = alone(model, DRAWN, 11)
    assert with_drafts(model, DRAWN, expected, 3, 2)[1] == [1, 2, 4, 4]


def test_rows_of_other_kinds_and_chunks_share_a_launch(model: Decoder) -> None:
    kinds = dict(enumerate(("greedy", "drawn", "log-probabilities")))
    expected = {slot: alone(model, KINDS[kind], 30) for slot, kind in kinds.items()}
    tokens = {slot: [*PROMPT, *(cell.token for cell in cells)] for slot, cells in expected.items()}
    drafter = KnowingDrafter(tokens, frozenset(len(PROMPT) + place for place in (5, 6, 11)))
    _, launches = started(model, drafter)
    found: dict[int, list[Cell]] = {slot: [] for slot in kinds}
    for number in range(40):
        if number % 4 == 0 and number // 4 in kinds:
            begin(launches, number // 4, KINDS[kinds[number // 4]], ENDLESS, 1 << 20)
        here = {slot: 7 for slot in kinds if number >= 4 * slot and len(found[slot]) < 22}
        for slot, run in launches.launch(here, drafts=(7, 3, 0, 1)[number % 4]).runs.items():
            found[slot] += run
    assert min(map(len, found.values())) >= 22
    assert {slot: cells[:22] for slot, cells in found.items()} == {s: cells[:22] for s, cells in expected.items()}


# ---------------------------------------------------------------- ends inside a run


@pytest.mark.parametrize("form", [Form.PLAIN, Form.FULL])
@pytest.mark.parametrize("drafts", [3, 7])
def test_a_run_is_trimmed_where_a_token_stops_the_row(model: Decoder, drafts: int, form: Form) -> None:
    """The drafter knows what the row would say if it went on."""
    free = alone(model, DRAWN, 30, form=form)
    place = next(i for i in range(10, 20) if free[i].token not in {cell.token for cell in free[:i]})
    stopping = StoppingParams(max_tokens=100, ignore_eos=True, stop_token_ids=(free[place].token,))
    assert alone(model, DRAWN, 30, stopping, form=form)[-1].flags == STOPPED
    found, runs = with_drafts(model, DRAWN, free, drafts, stopping=stopping, form=form)
    assert [cell.token for cell in found] == [cell.token for cell in free[: place + 1]]
    assert [cell.flags for cell in found] == [0] * place + [STOPPED]
    whole, rest = divmod(place, 1 + drafts)
    assert runs == [1, *[1 + drafts] * whole, *[rest] * bool(rest)], "the token that stops the row ends its run"


def test_stop_ids_are_masked_below_the_minimum_by_the_position_in_the_run(model: Decoder) -> None:
    free = alone(model, DRAWN, 30)
    early = tuple({free[2].token, free[6].token, free[12].token})
    stopping = StoppingParams(max_tokens=100, min_tokens=11, ignore_eos=True, stop_token_ids=early)
    expected = alone(model, DRAWN, 30, stopping)
    assert [cell.token for cell in expected] != [cell.token for cell in free[: len(expected)]]
    for drafts in (1, 3, 7):
        assert with_drafts(model, DRAWN, expected, drafts, 8, stopping=stopping)[0] == expected


@pytest.mark.parametrize("form", [Form.PLAIN, Form.FULL])
@pytest.mark.parametrize("length", [5, 9, 10, 11, 16])
def test_a_row_ends_at_its_length_inside_a_run_and_nothing_is_written_beyond(
    model: Decoder, length: int, form: Form
) -> None:
    free, max_len = alone(model, DRAWN, length + 10, form=form), len(PROMPT) + length
    tokens = [*PROMPT, *(cell.token for cell in free)]
    program, launches = started(model, KnowingDrafter({0: tokens}))
    begin(launches, 0, DRAWN, ENDLESS, max_len)
    launches.launch({0: 100}, form)
    table = program.rows.block_table[0]
    table[-(-(max_len - 1) // BLOCK) :] = 0  # nobody reserves blocks for what is never forwarded
    found, runs = said(launches, 0, 100, 7, form)
    assert [cell.token for cell in found] == [cell.token for cell in free[:length]]
    assert found[-1].flags == STOPPED
    assert runs[0] == 1 and max(runs) > 1
    written = torch.isfinite(program._cache.keys[0][1 : 1 + EACH].reshape(EACH * BLOCK, -1)).all(1).sum()
    assert written == max_len - 1, "every position but the last token's"


def test_logits_that_are_not_finite_end_the_row_at_their_place_in_the_run(model: Decoder) -> None:
    expected = alone(model, DRAWN, 12)
    for form in Form:
        drafter = KnowingDrafter({0: [*PROMPT, *(cell.token for cell in expected)]})
        program, launches = started(model, drafter)
        begin(launches, 0, DRAWN, ENDLESS, 1 << 20)
        launches.launch({0: 100}, form)
        launches.launch({0: 1}, form, 7)
        program._logits[0, 3] = np.nan
        run = launches.launch({0: 1}, form, 7).runs[0]
        assert [cell.token for cell in run[:3]] == [cell.token for cell in expected[1:4]]
        assert [cell.flags for cell in run] == [0, 0, 0, STOPPED | NON_FINITE]
        assert launches.launch({0: 1}, form).runs[0][0].flags & VOID, "the row has ended"


def test_logits_that_are_not_finite_behind_a_miss_are_nobodys(model: Decoder) -> None:
    expected = alone(model, DRAWN, 12)
    for form in Form:
        drafter = KnowingDrafter({0: [*PROMPT, *(cell.token for cell in expected)]}, frozenset({len(PROMPT) + 2}))
        program, launches = started(model, drafter)
        begin(launches, 0, DRAWN, ENDLESS, 1 << 20)
        launches.launch({0: 100}, form)
        launches.launch({0: 1}, form, 7)
        program._logits[0, 2:] = np.nan
        run = launches.launch({0: 1}, form, 7).runs[0]
        assert [(cell.token, cell.flags) for cell in run] == [(cell.token, 0) for cell in expected[1:3]]


# ---------------------------------------------------------------- beside them


def test_a_prompts_log_probabilities_lie_where_they_do_if_nobody_misses(model: Decoder) -> None:
    """The host knows how many drafts a launch may have, and not how many the drafter had of a row."""
    asked = SamplingParams(temperature=0.0, prompt_logprobs=2)
    _, launches = started(model)
    launches.begin(1, PROMPT, asked, stopping=ENDLESS)
    alone_ = launches.launch({1: 20}).prompt[1]
    tokens = [*PROMPT, *(cell.token for cell in alone(model, DRAWN, 8))]
    for known in (len(PROMPT) + 8, len(PROMPT) + 3, len(PROMPT)):
        _, launches = started(model, KnowingDrafter({0: tokens[:known], 1: PROMPT}))
        begin(launches, 0, DRAWN, ENDLESS, 1 << 20)
        launches.launch({0: 100})
        launches.begin(1, PROMPT, asked, stopping=ENDLESS)
        assert launches.launch({0: 1, 1: 20}, drafts=7).prompt[1] == alone_


# ---------------------------------------------------------------- what is counted


def test_penalties_count_what_was_kept_and_no_draft_that_missed(model: Decoder) -> None:
    expected = alone(model, PENALISED, 30)
    drafter = KnowingDrafter(
        {0: [*PROMPT, *(cell.token for cell in expected)]}, frozenset(len(PROMPT) + n for n in range(2, 30, 3))
    )
    program, launches = started(model, drafter)
    begin(launches, 0, PENALISED, ENDLESS, 1 << 20)
    launches.launch({0: 100})
    found, _ = said(launches, 0, 30, 7)
    count = int(program.rows.seq_len[0]) - len(PROMPT)
    counted = np.bincount([cell.token for cell in expected[:count]], minlength=VOCAB)
    assert found == expected
    assert program.rows.counts[1].tolist() == counted.tolist()


def test_it_is_said_how_many_drafts_were_looked_at(model: Decoder) -> None:
    expected = alone(model, DRAWN, 8)
    drafter = KnowingDrafter({slot: [*PROMPT, *(cell.token for cell in expected)] for slot in (0, 1)})
    _, launches = started(model, drafter)
    for slot in (0, 1):
        begin(launches, slot, DRAWN, ENDLESS, 1 << 20)
    launches.launch({0: 100})
    launches.launch({0: 1, 1: 5}, drafts=3)  # after its first token, 3 of row 0; row 1 has a chunk
    launches.launch({0: 1, 1: 100}, drafts=7)
    assert launches.rings.drafted[3, :2].tolist() == [3, 0]
    launches.launch({0: 1, 1: 1}, drafts=7)
    assert launches.rings.drafted[0, :2].tolist() == [4 - 1, 0], "3 of 8 tokens were left, and nothing more is known"
    assert drafter.asked == [3, 7, 7]


def test_a_drafter_is_told_of_tokens_that_no_chunk_brings(model: Decoder) -> None:
    drafter = KnowingDrafter()
    program, _ = started(model, drafter)
    history = np.array(PROMPT[:16], np.int32)
    record = admission_record(2, DRAWN, ENDLESS, len(PROMPT), 100, (), blocks=(3,), history=history)
    chunk = Chunk(2, 16, np.array(PROMPT[16:], np.int32), samples=True)
    plan = LaunchPlan(
        1,
        np.array([2], np.int32),
        np.ones(1, np.bool_),
        True,
        np.array([[2, 1, 4]], np.int32),
        (chunk,),
        (Admission(2, record),),
    )
    program.rows.begin()
    rings = program.rows.rings
    stage(plan, rings.plan[rings.slot(1)], rings.bulk[rings.slot(1)])
    program.rows.apply()
    assert drafter.told[2] == dict(enumerate(PROMPT))
