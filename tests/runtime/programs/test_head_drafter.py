"""A draft head, or a model, over rows of a real one on the CPU: it proposes what its definition says, however its rows
came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Form
from runahead.runtime.programs.cpu.drafter import HeadDrafter
from runahead.runtime.wire.parameters import SamplingParams
from tests.runtime.models.eagle3_heads import NARROW, save_foreseen3
from tests.runtime.models.eagle_heads import VOCAB, save_foreseen
from tests.runtime.models.mimo_heads import save_foreseen_mimo
from tests.runtime.models.qwen_heads import HEADED, save_foreseen_qwen
from tests.runtime.programs.head_worlds import (
    ALL,
    BLOCK,
    DRAWN,
    EACH,
    GREEDY,
    MOST,
    PROMPT,
    World,
    eagle3_world,
    eagle_world,
    entries,
    lived,
    mimo_world,
    model_world,
    plain,
    qwen_world,
    save_twice,
)
from tests.runtime.programs.late_blocks import Foreseen, completed, live_over_borders

pytestmark = pytest.mark.usefixtures("without_gradients")

Make = Callable[..., World]
KINDS: dict[str, tuple[Make, Callable[[Path, Path], object]]] = {
    "eagle-1": (eagle_world, save_foreseen),
    "eagle-3": (eagle3_world, save_foreseen3),
    "mtp": (mimo_world, save_foreseen_mimo),
    "mtp over states": (qwen_world, save_foreseen_qwen),
    "model": (model_world, save_twice),
}


ALL_NORMS = ("norm_before_residual", "norm_before_fc", "norm_output")  # of EAGLE-3, that can be together


@pytest.fixture(scope="module", params=[*KINDS, "eagle-3 with norms"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("random")
    return KINDS[request.param][0](folder) if request.param in KINDS else eagle3_world(folder, norms=ALL_NORMS)


@pytest.fixture(scope="module")
def completion(world: World) -> list[int]:
    """What follows the prompt."""
    return plain(world, GREEDY, 60)


# ---------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (eagle_world, {}),
        (eagle_world, {"bias": True}),
        (eagle3_world, {}),
        (eagle3_world, {"known": VOCAB}),
        (eagle3_world, {"width": NARROW}),
        (eagle3_world, {"reads": (2, 0, 2)}),
        (eagle3_world, {"norms": ("norm_before_residual",)}),
        (eagle3_world, {"norms": ("norm_before_fc",)}),
        (eagle3_world, {"norms": ("fc_norm", "norm_output"), "width": NARROW}),
        (eagle3_world, {"norms": ALL_NORMS}),
        (mimo_world, {}),
        *((qwen_world, {"case": case}) for case in HEADED.values()),
        (model_world, {}),
    ],
)
def test_what_is_proposed_is_what_the_definition_says(make: Make, given: dict[str, Any], tmp_path: Path) -> None:
    world = make(tmp_path, **given)
    said = [*PROMPT, *plain(world, GREEDY, 60)]
    states = world.states(said)
    _, _, heard = lived(world, said, (0, 3, 7, 1, 2))
    assert len(heard.heard) > 10
    for length, proposed in heard.heard.items():
        assert len(proposed) == MOST
        assert proposed == world.by_definition.proposes(said[:length], states, MOST)
    assert len({tuple(proposed) for proposed in heard.heard.values()}) > 8, "they are not all alike"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_first_entry_is_that_of_the_second_token(world: World, length: int) -> None:
    """In a short row one more would be seen."""
    program, launches = world.started()
    launches.begin(0, PROMPT[:length], GREEDY)
    launches.launch({0: ALL})
    said = [*PROMPT[:length], launches.launch({0: 1}, drafts=MOST).tokens[0]]
    assert program.rows.proposed[0].tolist() == world.by_definition.proposes(said, world.states(said), MOST)


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


@pytest.mark.parametrize("right", [*(pytest.param(right, marks=pytest.mark.large) for right in (0, 3)), 7])
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


def test_a_block_that_comes_with_the_launch_that_drafts_into_it_is_there_for_the_drafter(world: World) -> None:
    """Apply writes it into the row's table behind the S that has verified, and before the next drafts are made."""
    texts = completed(world, 70)
    program, launches = world.started()
    drafter, foreseen = program.rows.drafter, Foreseen(texts)
    assert isinstance(drafter, HeadDrafter)
    own = drafter.propose

    def propose(slots: NDArray[np.int64], lengths: NDArray[np.int64], count: int) -> NDArray[np.int32]:
        rows = zip(slots.tolist(), lengths.tolist(), own(slots, lengths, count).tolist(), strict=True)
        return np.array([foreseen.shown(*row) for row in rows], np.int32)

    drafter.propose = propose  # type: ignore[method-assign]
    assert live_over_borders(launches, texts, MOST, 102) >= 2
    states = {slot: world.states(text) for slot, text in texts.items()}
    for (slot, length), proposed in foreseen.proposed.items():
        assert proposed == world.by_definition.proposes(texts[slot][:length], states[slot], MOST)


# ---------------------------------------------------------------- what it is for


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_head_that_knows_its_target_is_right_each_time(
    kind: str, sampling: SamplingParams, form: Form, tmp_path: Path
) -> None:
    """A drawn token too: it is drawn with the noise of its position."""
    make, write = KINDS[kind]
    world = make(tmp_path, write)
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


def test_a_snapshot_of_a_state_is_taken_for_no_block(world: World) -> None:
    program, launches = world.started()
    launches.begin(0, PROMPT, GREEDY)
    launches.launch({0: ALL})
    batch = program._head._batch(np.array([0]), np.array([3], np.int32), np.array([BLOCK + 1]))  # type: ignore[union-attr]
    assert batch.block_tables.tolist() == [list(range(1, 1 + EACH))]
    assert batch.slot_mapping.tolist() == [2 * BLOCK + 1]


@pytest.mark.parametrize("length", [3, 9, 10, 16])
def test_nothing_is_written_where_a_row_has_no_block(length: int, tmp_path: Path) -> None:
    world = eagle_world(tmp_path, save_foreseen)
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
