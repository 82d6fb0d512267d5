"""What the steps of a drafter with layers run on, row by row, and what they propose."""

from __future__ import annotations

from typing import Final

import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.row_state import make_row_state  # noqa: E402
from runahead.runtime.kernels.triton.drafting.head_inputs import NOWHERE  # noqa: E402
from runahead.runtime.kernels.triton.drafting.head_steps import HeadRows, begin_step, make_head_rows  # noqa: E402
from runahead.runtime.kernels.triton.row_state.drafts import DraftState, make_draft_state  # noqa: E402
from tests.runtime.kernels.masked_rows import device_rows, rows_with_masks  # noqa: E402

BLOCK, EACH, COUNT, MOST, VOCAB = 4, 5, 3, 7, 50
# By row slot: a row that goes on, one with room for two more tokens, one at its last, one with a grammar, one that has
# ended, and one that is held; the last slot is nobody's.
LENGTHS: Final = (6, 9, 11, 6, 6, 7)
PLAIN, SHORT, LAST, GRAMMAR, ENDED, HELD, NULL = range(7)
OLD: Final = 77  # what was proposed before


def rows_of(
    holds: bool, guesses: int = MOST, count: int = COUNT, kept: int = NULL + 1
) -> tuple[HeadRows, DraftState, torch.Tensor, list[dict[str, list[int]]]]:
    """After all steps, `count` of them: their rows, what is proposed, who is held, and each step's inputs. kept: row
    slots that have drafts, where rows may be held."""
    state = make_row_state(NULL, EACH, VOCAB, DEVICE)
    state.seq_len[:NULL] = torch.tensor(LENGTHS)
    state.last_token[:NULL] = torch.arange(NULL) + 20
    state.alive[:NULL] = True
    state.alive[ENDED] = False
    state.max_position[:] = 19
    state.max_position[SHORT], state.max_position[LAST] = 11, 11
    state.mask_epoch[GRAMMAR] = 1
    state.block_table[:NULL] = 1 + torch.arange(NULL)[:, None] * EACH + torch.arange(EACH)
    drafts = make_draft_state(NULL + 1, 0, EACH, 8, MOST, DEVICE, kept_slots=kept if holds else 0)
    drafts.proposed.fill_(OLD)
    drafts.drafted.fill_(5)
    held = torch.zeros(NULL + 1, dtype=torch.int8, device=DEVICE)
    if holds:
        held[HELD] = 1
        drafts.guesses.fill_(guesses)
    steps = make_head_rows(NULL + 1, 8, EACH, DEVICE)
    slots = torch.tensor([PLAIN, SHORT, LAST, GRAMMAR, ENDED, HELD, NULL, NULL], dtype=torch.int32, device=DEVICE)
    seen = []
    for ahead in range(count + 1):
        chosen = None if not ahead else torch.arange(8, device=DEVICE) + 10 * ahead
        of_held = held if holds else None
        begin_step(8, ahead, count, slots, state, drafts, steps, BLOCK, VOCAB, chosen, of_held)
        seen.append(
            {
                name: getattr(steps, name).tolist()
                for name in ("token_ids", "positions", "slot_mapping", "seq_lens", "next_position", "active")
            }
        )
    return steps, drafts, held, seen


def test_a_row_takes_as_many_steps_as_it_has_room_for() -> None:
    steps, drafts, _, seen = rows_of(holds=False)
    assert drafts.drafted[:NULL].tolist() == [3, 2, 0, 0, 0, 3]
    assert drafts.proposed[:NULL].tolist() == [
        [10, 20, 30, *[-1] * 4], [11, 21, *[-1] * 5], *[[-1] * MOST] * 3, [15, 25, 35, *[-1] * 4],
    ]  # fmt: skip
    lives = [[bool(length) for length in step["seq_lens"]] for step in seen]
    assert lives[0] == lives[1] == [True, True, False, False, False, True, False, False]
    assert lives[2] == [True, False, False, False, False, True, False, False]
    assert not any(lives[3])
    assert [step["token_ids"][0] for step in seen[:3]] == [20, 10, 20]
    assert [step["positions"][0] for step in seen[:3]] == [5, 6, 7]
    assert [step["seq_lens"][0] for step in seen[:3]] == [6, 7, 8]
    first = 1 + PLAIN * EACH
    assert [step["slot_mapping"][0] for step in seen[:3]] == [(first + 1) * BLOCK + offset for offset in (1, 2, 3)]
    assert [step["slot_mapping"][2:5] for step in seen] == [[0, 0, 0]] * 4, "others write to the null block"
    assert [step["next_position"][PLAIN] for step in seen[:3]] == [6, 7, 8]
    assert [step["active"][:NULL] for step in seen] == [step[:NULL] for step in lives]
    # The hidden state before the newest token, which stands at length - 1.
    assert steps.before.tolist()[:3] == [(first + 1) * BLOCK, (1 + SHORT * EACH + 1) * BLOCK + 3, NOWHERE]
    assert steps.block_tables[0, :2].tolist() == [first, first + 1]


def test_a_row_that_is_held_keeps_its_drafts_and_one_with_a_grammar_what_is_forced() -> None:
    _, drafts, _, seen = rows_of(holds=True, guesses=1)
    assert drafts.drafted[:NULL].tolist() == [1, 1, 0, 5, 0, 5]
    assert drafts.proposed[GRAMMAR].tolist() == drafts.proposed[HELD].tolist() == [OLD] * MOST
    assert drafts.proposed[PLAIN].tolist() == [10, *[-1] * 6], "as many as the plan has asked for"
    assert [any(step["seq_lens"]) for step in seen] == [True, False, False, False]


def test_a_row_whose_run_would_not_be_kept_has_no_guesses() -> None:
    _, drafts, _, _ = rows_of(holds=True, kept=SHORT)
    assert drafts.drafted[:NULL].tolist() == [3, 0, 0, 5, 0, 5]


def test_without_a_step_nobody_has_guesses_of_before() -> None:
    """As where the plan has grammars alone say drafts."""
    _, drafts, _, (seen,) = rows_of(holds=True, guesses=0, count=0)
    assert drafts.drafted[:NULL].tolist() == [0, 0, 0, 5, 0, 5]
    assert drafts.proposed[PLAIN].tolist() == drafts.proposed[SHORT].tolist() == [-1] * MOST
    assert drafts.proposed[GRAMMAR].tolist() == drafts.proposed[HELD].tolist() == [OLD] * MOST
    assert not any(seen["seq_lens"])


def test_a_drafter_is_asked_for_nothing_where_grammars_alone_say_drafts() -> None:
    rows, asked = device_rows(rows_with_masks(0, VOCAB, guesses=False), 0), list[tuple[int, int]]()
    rows.guess = lambda num_rows, count: asked.append((num_rows, count))
    rows.draft(2, COUNT, forced=True)
    rows.draft(2, COUNT)
    assert asked == [(2, 0), (2, COUNT)], "the call without a step forgets what was guessed before"
