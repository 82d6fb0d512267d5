"""A draft head over rows of a real model on the CPU: it proposes what its definition says, however its rows came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from runahead.cuda_graphs.rings import RingLayout, allocate_rings
from runahead.cuda_graphs.shape import Form
from runahead.runtime.checkpoint import open_checkpoint, open_head
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.memory.slot_pool import NO_SLOT
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.draft_head import DraftHead
from runahead.runtime.models.eagle import open_eagle
from runahead.runtime.models.load import load_model
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.programs.head_drafter import HeadDrafter
from runahead.runtime.programs.reference import HostProgram
from runahead.runtime.wire.parameters import SamplingParams
from tests.runtime.launches import ENDLESS, Launches, _Row, over_program
from tests.runtime.models.checkpoints import CASES, save
from tests.runtime.models.eagle_heads import VOCAB, HeadByDefinition, random_head, save_foreseen, write_head

ROWS, BLOCK, EACH, MOST = 4, 16, 8, 7
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=5)
PROMPT = np.random.default_rng(3).integers(2, VOCAB, 45).tolist()
ALL = 1000


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@dataclass
class Heard:
    """A head whose proposals are kept, and of which the rows see others: `rights` tokens of what they are about to say,
    in a circle, and then a wrong one."""

    own: HeadDrafter
    said: list[int] = field(default_factory=list)  # prompt and completion, of every row
    rights: Sequence[int] = (0,)
    heard: dict[int, list[int]] = field(default_factory=dict)  # by length

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def propose(self, slots: NDArray[np.int64], lengths: NDArray[np.int64], count: int) -> NDArray[np.int32]:
        found = self.own.propose(slots, lengths, count)
        shown = np.zeros_like(found)
        for i, length in enumerate(lengths.tolist()):
            own = [token for token in found[i].tolist() if token >= 0]
            known = self.heard.get(length, own)
            assert known[: len(own)] == own[: len(known)], "it does not hang on how the row came there"
            self.heard[length] = max(known, own, key=len)
            right = self.rights[length % len(self.rights)]
            for ahead in range(count):
                token = self.said[length + ahead] if length + ahead < len(self.said) else 0
                shown[i, ahead] = token if ahead < right else (token + 1) % VOCAB
        return np.where(found >= 0, shown, found)


@dataclass(frozen=True, slots=True)
class World:
    target: Decoder
    head: DraftHead
    by_definition: HeadByDefinition
    hidden_of: Any  # the target as transformers has it

    def started(self) -> tuple[HostProgram, Launches]:
        """Every KV block is NaN at the start."""
        rings = allocate_rings(RingLayout(4, PLAN_WORDS, 8192, ROWS, 4, prompt_tokens=200, drafts=MOST))
        program = HostProgram(
            self.target, rings, max_rows=ROWS, num_blocks=ROWS * EACH + 1, block_size=BLOCK,
            context_length=EACH * BLOCK, head=self.head,
        )  # fmt: skip
        program.poison_blocks(tuple(range(1, ROWS * EACH + 1)))
        return program, Launches(over_program(program), rings, VOCAB, EACH)


def world_of(folder: Path, *, foreseen: bool = False, bias: bool = False) -> World:
    target_folder, head_folder = folder / "target", folder / "head"
    if foreseen:
        save_foreseen(target_folder, head_folder)
    else:
        save(CASES[0], target_folder)
        write_head(head_folder, random_head(bias=bias))
    kernels = ReferenceKernels()
    target = load_model(open_checkpoint(target_folder), torch.device("cpu"), torch.float32, "auto", kernels)
    eagle = open_eagle(open_head(head_folder), target.config, EACH * BLOCK, "draft_model", "context_length")
    head = DraftHead(eagle.weights(kernels.pack_weight), target, kernels, EACH * BLOCK)
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32, attn_implementation="eager").eval()
    by_definition = HeadByDefinition(
        load_file(head_folder / "model.safetensors"), model.model.embed_tokens.weight, model.lm_head.weight
    )
    return World(target, head, by_definition, model.model)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_of(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def completion(world: World) -> list[int]:
    """What follows the prompt."""
    return plain(world, GREEDY, 60)


def plain(world: World, sampling: SamplingParams, count: int) -> list[int]:
    _, launches = world.started()
    launches.begin(0, PROMPT, sampling)
    launches.launch({0: ALL})
    return launches.decode((0,), count)[0]


def lived(
    world: World, said: list[int], rights: Sequence[int], drafts: Sequence[int] = (MOST,), chunk: int = ALL,
    known: int = len(PROMPT), slot: int = 0, until: int = 100, began: tuple[HostProgram, Launches, Heard] | None = None,
    cached: int = 0,
) -> tuple[HostProgram, Launches, Heard]:  # fmt: skip
    """A row that lives up to a length. known: tokens that are read in chunks. drafts: K of each launch, in a circle.
    cached: tokens whose blocks are those of row 0 of the same program."""
    program, launches = world.started() if began is None else began[:2]
    heard = Heard(program.rows.drafter) if began is None else began[2]  # type: ignore[arg-type]
    heard.said, heard.rights = said, rights
    program.rows.drafter = heard
    own = tuple(range(1 + slot * EACH, 1 + slot * EACH + EACH))
    blocks = tuple(range(1, 1 + cached // BLOCK)) + own[cached // BLOCK :]
    row = _Row(list(said[:known]), len(PROMPT), GREEDY, NO_SLOT, blocks, ENDLESS, 1 << 20, computed=cached)
    launches._rows[slot] = row
    while row.computed < known:
        launches.launch({slot: chunk})
    length, number, found = known, 0, []
    while length < until:
        run = launches.launch({slot: 1}, drafts=drafts[number % len(drafts)]).runs[slot]
        found += [cell.token for cell in run]
        length, number = known + len(found), number + 1
    assert found == said[known : known + len(found)], "no draft changes a token"
    return program, launches, heard


def entries(program: HostProgram, slot: int, count: int) -> list[NDArray[np.float32]]:
    """What lies in a row's blocks of positions below `count`: keys, values and hidden states. Entry 0 is nobody's."""
    drafter = program._head
    assert drafter is not None
    places = np.concatenate([np.arange(BLOCK) + BLOCK * int(block) for block in program.rows.block_table[slot]])
    cache = drafter._cache
    kept = [tensor.numpy().reshape(-1, *tensor.shape[2:]) for tensor in (*cache.entries.keys, *cache.entries.values)]
    return [*(part[places[1:count]] for part in kept), cache.hidden[places[:count]]]


# ---------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize("bias", [False, True])
def test_what_is_proposed_is_what_the_definition_says(bias: bool, tmp_path: Path) -> None:
    world = world_of(tmp_path, bias=bias)
    said = [*PROMPT, *plain(world, GREEDY, 60)]
    hidden = world.hidden_of(torch.tensor([said])).last_hidden_state[0].double().numpy()
    _, _, heard = lived(world, said, (0, 3, 7, 1, 2))
    assert len(heard.heard) > 10
    for length, proposed in heard.heard.items():
        assert len(proposed) == MOST
        assert proposed == world.by_definition.proposes(said[:length], hidden, MOST)
    assert len({tuple(proposed) for proposed in heard.heard.values()}) > 8, "they are not all alike"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_first_entry_is_that_of_the_second_token(world: World, length: int) -> None:
    """In a short row one more would be seen."""
    program, launches = world.started()
    launches.begin(0, PROMPT[:length], GREEDY)
    launches.launch({0: ALL})
    said = [*PROMPT[:length], launches.launch({0: 1}, drafts=MOST).tokens[0]]
    hidden = world.hidden_of(torch.tensor([said])).last_hidden_state[0].double().numpy()
    assert program.rows.proposed[0].tolist() == world.by_definition.proposes(said, hidden, MOST)


# ---------------------------------------------------------------- how a row came there


@pytest.mark.parametrize("chunk", [1, 7, BLOCK, 2 * BLOCK])
def test_entries_do_not_hang_on_the_cut_of_the_prompt(world: World, completion: list[int], chunk: int) -> None:
    said = [*PROMPT, *completion]
    whole = lived(world, said, (2,), until=60)
    cut = lived(world, said, (2,), until=60, chunk=chunk)
    assert cut[2].heard == whole[2].heard
    for ours, theirs in zip(entries(cut[0], 0, 58), entries(whole[0], 0, 58), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("drafts", [(0,), (1,), (7, 0, 3), (0, 0, 7)])
def test_entries_do_not_hang_on_what_was_drafted(world: World, completion: list[int], drafts: Sequence[int]) -> None:
    """Those of drafts that missed, and those that stood on expected hidden states, are written over."""
    said = [*PROMPT, *completion]
    once = lived(world, said, (0,), drafts=(0,), until=80)
    again = lived(world, said, (0, 7, 2, 3), drafts=drafts, until=80)
    for ours, theirs in zip(entries(again[0], 0, 79), entries(once[0], 0, 79), strict=True):
        assert np.isfinite(ours).all()
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("right", [0, 3, 7])
def test_a_prefix_that_ends_inside_a_run_is_found_as_if_it_were_read(
    world: World, completion: list[int], right: int
) -> None:
    """The row whose blocks are found ends with a launch: no later one comes back to what it had drafted right."""
    said = [*PROMPT, *completion]
    cold = lived(world, said, (right,), known=70, until=90)
    for until in range(65, 72):
        began = lived(world, said, (right,), until=until)
        cached = (until - 1) // BLOCK * BLOCK
        assert cached == 64
        began[2].heard.clear()
        warm = lived(world, said, (right,), known=70, slot=1, until=90, began=began, cached=cached)
        assert {length: warm[2].heard[length] for length in cold[2].heard} == cold[2].heard
        for ours, theirs in zip(entries(warm[0], 1, 88), entries(cold[0], 0, 88), strict=True):
            assert np.array_equal(ours, theirs)


def test_a_row_that_comes_again_drafts_as_before(world: World, completion: list[int]) -> None:
    said = [*PROMPT, *completion]
    cold = lived(world, said, (1,), until=95)
    began = lived(world, said, (1,), until=61)
    program = began[0]
    program.poison_blocks(tuple(range(1, 1 + EACH)))  # it was evicted, and its blocks are nobody's
    program.poison_row_slot(0)
    again = lived(world, said, (1,), known=61, slot=2, chunk=BLOCK, until=95, began=began)
    common = cold[2].heard.keys() & again[2].heard.keys()
    assert len(common) > 10
    for ours, theirs in zip(entries(again[0], 2, 93), entries(cold[0], 0, 93), strict=True):
        assert np.array_equal(ours, theirs)


def test_rows_side_by_side_draft_as_each_alone(world: World, completion: list[int]) -> None:
    alone = lived(world, [*PROMPT, *completion], (0,), until=60)
    program, launches = world.started()
    launches.begin(0, PROMPT, GREEDY)
    launches.begin(1, PROMPT[:20], DRAWN)
    launches.begin(2, PROMPT[10:], GREEDY)
    launches.launch({0: ALL, 1: ALL})
    for number in range(12):
        here = {0: 1, 1: 1} if number < 3 else {0: 1, 1: 1, 2: 5}
        launches.launch(here, drafts=(7, 0, 3)[number % 3])
    for ours, theirs in zip(entries(program, 0, 56), entries(alone[0], 0, 56), strict=True):
        assert np.array_equal(ours, theirs)


# ---------------------------------------------------------------- what it is for


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_head_that_knows_its_target_is_right_each_time(sampling: SamplingParams, form: Form, tmp_path: Path) -> None:
    """A drawn token too: it is drawn with the noise of its position."""
    world = world_of(tmp_path, foreseen=True)
    expected = plain(world, sampling, 33)
    _, launches = world.started()
    launches.begin(0, PROMPT, sampling)
    launches.launch({0: ALL}, form)
    runs: list[list[int]] = []
    while sum(map(len, runs)) < 33:
        runs.append([cell.token for cell in launches.launch({0: 1}, form, MOST).runs[0]])
    assert [token for run in runs for token in run] == expected
    assert list(map(len, runs)) == [1, 8, 8, 8, 8]
    assert len(set(expected)) > 4


def test_nothing_is_guessed_of_a_row_with_a_grammar(world: World) -> None:
    """Whoever makes its masks does not know what a head would guess."""
    program, launches = world.started()
    for slot in (0, 1):
        launches.begin(slot, PROMPT, GREEDY)
    launches.launch({0: ALL, 1: ALL})
    program.rows.mask_epoch[1] = 1
    proposed = program._head.propose(np.array([0, 1]), np.array([len(PROMPT), len(PROMPT)]), 3)  # type: ignore[union-attr]
    assert (proposed >= 0).tolist() == [[True] * 3, [False] * 3]


@pytest.mark.parametrize("length", [3, 9, 10, 16])
def test_nothing_is_written_where_a_row_has_no_block(length: int, tmp_path: Path) -> None:
    world = world_of(tmp_path, foreseen=True)
    max_len = len(PROMPT) + length
    program, launches = world.started()
    launches.begin(0, PROMPT, GREEDY, max_len=max_len)
    launches.launch({0: ALL})
    program.rows.block_table[0][-(-(max_len - 1) // BLOCK) :] = 0
    tokens = 0
    while tokens < length:
        tokens += len(launches.launch({0: 1}, drafts=MOST).runs[0])
    assert tokens == length
    drafter = program._head
    assert drafter is not None
    keys = drafter._cache.entries.keys[0][1 : 1 + EACH].reshape(EACH * BLOCK, -1)
    assert torch.isfinite(keys).all(1).sum() == max_len - 1
