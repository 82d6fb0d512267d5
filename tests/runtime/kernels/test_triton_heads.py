"""Draft heads by Triton's kernels propose what the reference's do, however a row came there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from tests.runtime.kernels.matrix_units import multiply_as_matrix_units
from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.forward_batch import ForwardBatch  # noqa: E402
from runahead.runtime.kernels.triton.attention import schedule  # noqa: E402
from runahead.runtime.kernels.triton.forward import decode  # noqa: E402
from runahead.runtime.programs.cuda.draft_head import TritonHead  # noqa: E402
from runahead.runtime.programs.cuda.draft_model import TritonDraftModel  # noqa: E402
from tests.runtime.kernels.head_on_triton import lived_on_triton, triton_world  # noqa: E402
from tests.runtime.models.eagle_heads import VOCAB  # noqa: E402
from tests.runtime.models.qwen_heads import IN_TILES  # noqa: E402
from tests.runtime.programs.head_worlds import (  # noqa: E402
    ALL,
    BLOCK,
    DRAWN,
    EACH,
    GREEDY,
    PROMPT,
    World,
    eagle3_world,
    eagle_world,
    mimo_world,
    model_world,
    plain,
    qwen_world,
)
from tests.runtime.programs.late_blocks import Foreseen, completed, live_over_borders  # noqa: E402

Make = Callable[..., World]
RIGHTS: Final = (0, 3, 1)  # of what is proposed, in a circle
NORMS: Final = ("norm_before_residual", "norm_before_fc", "norm_output")
KINDS: Final[dict[str, tuple[Make, dict[str, Any]]]] = {
    "eagle-1": (eagle_world, {"bias": True}),
    "eagle-3": (eagle3_world, {}),
    "eagle-3 with norms": (eagle3_world, {"norms": NORMS}),
    "mtp": (mimo_world, {}),
    "mtp over states": (qwen_world, {"case": IN_TILES}),
}
MODEL: Final = "model"  # a whole one, with layers and heads of its own shapes
OF_ALL: Final = "eagle-3 with norms"  # which has most that a head may have: what every run looks at
ERROR: Final = 0.06  # of bfloat16, over the norm of what is expected; the interpreter cuts bits off instead of rounding

pytestmark = [
    pytest.mark.usefixtures("without_gradients"),
    pytest.mark.timeout(600),
    # Lines that no row needs hold whatever memory held: nobody reads what is computed of them.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]


def batch_of(lengths: np.ndarray[Any, np.dtype[np.int64]], tables: torch.Tensor, device: torch.device) -> ForwardBatch:
    """The newest token of each of these rows, the same one in all of them. tables: int32 [R, EACH]"""
    rows, positions = len(lengths), torch.from_numpy(lengths - 1)
    blocks = tables[torch.arange(rows), positions // BLOCK].long()
    return ForwardBatch(
        token_ids=torch.full((rows,), 7, device=device),
        positions=positions.to(device),
        slot_mapping=(blocks * BLOCK + positions % BLOCK).to(device),
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=device),
        seq_lens=torch.from_numpy(lengths.astype(np.int32)).to(device),
        block_tables=tables.to(device),
        num_tokens=rows,
        num_rows=rows,
        max_seq_len=EACH * BLOCK,
        is_decode=True,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_of_a_head_are_the_references(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, a few, and more than products of a few rows take. No step embeds a token by itself: its embedding comes
    with the hidden state before it."""
    embedded: list[int] = []
    begin_decode = schedule.begin_decode

    def counted(token_ids: torch.Tensor, *rest: Any, **named: Any) -> schedule.AttentionWork:
        embedded.append(len(token_ids))
        return begin_decode(token_ids, *rest, **named)

    monkeypatch.setattr(decode, "begin_decode", counted)
    make, given = KINDS[kind]
    world = make(tmp_path, **given)
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    for rows in (1, 3, *((66,) if kind == OF_ALL else ())):
        dice = np.random.default_rng(rows)
        lengths, num_blocks = dice.integers(2, 70, rows), rows * EACH + 1
        tables = torch.from_numpy(dice.permutation(np.arange(1, num_blocks, dtype=np.int32)).reshape(rows, EACH))
        ours = triton_world(tmp_path, DEVICE, torch.bfloat16).head
        assert isinstance(ours, TritonHead)
        expected, found = world.head.make_cache(num_blocks, BLOCK), ours.make_cache(num_blocks, BLOCK)
        generator = torch.Generator().manual_seed(rows)
        pairs = zip(
            (*expected.entries.keys, *expected.entries.values), (*found.entries.keys, *found.entries.values),
            strict=True,
        )  # fmt: skip
        for theirs, own in pairs:
            own.copy_(theirs.copy_(torch.randn(theirs.shape, generator=generator).bfloat16().float()))
            own.view(-1, *own.shape[2:])[batch_of(np.ones(rows, np.int64), tables, DEVICE).slot_mapping] = float("nan")
        hidden = torch.randn(expected.hidden.shape, generator=generator).bfloat16().float()
        found.hidden.copy_(hidden)
        expected.hidden[:] = hidden.numpy()
        logits = torch.full((rows, VOCAB), -1e30, device=DEVICE)
        before = batch_of(lengths - 1, tables, DEVICE).slot_mapping
        states = hidden[before.cpu()].numpy()
        for is_first in (True, False):
            wanted, of_vocab = world.head.step(batch_of(lengths, tables, torch.device("cpu")), states, expected)
            left = ours.step(batch_of(lengths, tables, DEVICE), before, is_first, found, logits)
            assert relative_error(left, torch.from_numpy(wanted)) < ERROR, (rows, is_first)
            known = of_vocab > -1e20
            assert relative_error(logits.cpu()[known], of_vocab[known]) < ERROR, (rows, is_first)
            assert bool((logits.cpu()[~known] == -1e30).all())
            lengths, states = lengths + 1, wanted
            before = torch.from_numpy(wanted).to(DEVICE, torch.bfloat16)
    assert embedded == [0] * len(embedded) and len(embedded) >= 4


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.large) for kind in (*KINDS, MODEL) if kind != OF_ALL), OF_ALL]
)
def test_what_is_proposed_hangs_neither_on_the_cut_of_the_prompt_nor_on_the_cache(kind: str, tmp_path: Path) -> None:
    """It is what the definition says, of a row that lives through runs of several lengths; of one that begins with the
    cached blocks of that one, in chunks, beside another that decodes; and of one that comes again when its blocks were
    taken from it."""
    make, given = KINDS.get(kind, (model_world, {}))
    world = make(tmp_path, **given)
    said = [*PROMPT, *plain(world, GREEDY, 45)]
    states, of_triton = world.states(said), triton_world(tmp_path, DEVICE)
    program, launches, found = lived_on_triton(of_triton, said, RIGHTS, drafts=(3,), until=62)
    launches.begin(2, PROMPT[:9], DRAWN)
    launches.launch({2: ALL})
    began = program, launches
    cached = lived_on_triton(
        of_triton, said, RIGHTS, (3,), chunk=5, known=54, slot=1, until=60, began=began, cached=48, beside={2: 1}
    )[2]
    program.poison_blocks(tuple(range(1, 1 + EACH)))
    again = lived_on_triton(of_triton, said, (3,), (3, 0), chunk=BLOCK, known=54, slot=3, until=60, began=began)[2]
    assert len(found) > 5 and min(len(cached), len(again)) > 1
    assert len({tuple(proposed) for proposed in found.values()}) > 4, "they are not all alike"
    for heard in (found, cached, again):
        for length, proposed in heard.items():
            assert proposed == world.by_definition.proposes(said[:length], states, 3)


def test_a_block_that_comes_with_the_launch_that_drafts_into_it_is_there_for_the_steps(tmp_path: Path) -> None:
    """Apply writes it into the row's table behind the S that has verified, and before the steps."""
    make, given = KINDS[OF_ALL]
    world = make(tmp_path, **given)
    texts = completed(world, 26)
    program, launches = triton_world(tmp_path, DEVICE).started()
    own, drafts, foreseen = program.rows.guess, program.rows.drafts, Foreseen(texts)
    assert own is not None and drafts is not None

    def guess(num_rows: int, count: int) -> None:
        own(num_rows, count)
        for slot in texts:
            length = int(program.rows.state.seq_len[slot])
            shown = foreseen.shown(slot, length, drafts.proposed[slot, :count].tolist())
            drafts.proposed[slot, :count] = torch.tensor(shown, dtype=torch.int32)

    program.rows.guess = guess
    assert live_over_borders(launches, texts, 7, 68) >= 2
    states = {slot: world.states(text) for slot, text in texts.items()}
    for (slot, length), proposed in foreseen.proposed.items():
        assert proposed == world.by_definition.proposes(texts[slot][:length], states[slot], 7)


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3", MODEL])
def test_logits_are_bounded_as_those_of_the_model_that_makes_them(kind: str, tmp_path: Path) -> None:
    """By a draft model's own tanh, and by the target's in a head that has no matrix of its own: what is drawn is then
    drawn as S would draw it."""
    make, given = KINDS.get(kind, (model_world, {}))
    make(tmp_path, **given)
    world, cap = triton_world(tmp_path, DEVICE), 0.5
    tables = torch.arange(1, 1 + 2 * EACH, dtype=torch.int32).reshape(2, EACH)
    lengths = np.array([5, 9])
    before = batch_of(lengths - 1, tables, DEVICE).slot_mapping

    def logits(bounded_by: float) -> torch.Tensor:
        head, found = world.head, torch.full((2, VOCAB), -1e30, device=DEVICE)
        if isinstance(head, TritonHead):
            world.target.weights = replace(world.target.weights, logit_cap=bounded_by)
            head = TritonHead(head.weights, world.target, EACH * BLOCK)
        else:
            assert isinstance(head, TritonDraftModel)
            head._model.weights = replace(head._model.weights, logit_cap=bounded_by)
        head.step(batch_of(lengths, tables, DEVICE), before, True, head.make_cache(1 + 2 * EACH, BLOCK), found)
        return found

    plain, own = logits(0.0), kind == "eagle-3"
    expected = plain if own else cap * torch.tanh(plain / cap)
    assert relative_error(logits(cap), expected) < 1e-5
    assert own or relative_error(plain, expected) > 0.1, "as if nothing had to be bounded"
