"""The shape that a device is told, worked out once more from what the launch's rows are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.cuda_graphs.rings import RingMemory
from runahead.runtime.plan import CHUNK_ROW, CHUNK_TOKENS, read_plan
from runahead.runtime.scheduler.ledger import Launch
from tests.simulation.policy import HeldToItsWord


def check_shape(launch: Launch, rings: RingMemory, scheduler: HeldToItsWord) -> str:
    """Of a launch whose plan was staged and that the ledger does not know yet. Returns what `_form` says of it."""
    chunks = read_plan(rings.plan[rings.slot(launch.number)]).chunks
    per_row = 1 + launch.shape.drafts
    counts = np.full(launch.row_slots.size, per_row)
    counts[chunks[:, CHUNK_ROW]] = chunks[:, CHUNK_TOKENS]
    asking = [scheduler.holdings.by_slot[slot] for slot in launch.row_slots[chunks[:, CHUNK_ROW]].tolist()]
    decoding = np.delete(launch.row_slots, chunks[:, CHUNK_ROW])
    drafts, guesses = _drafts(launch, scheduler, decoding, len(chunks))
    slots, _, samples = scheduler.ledger.last_rows()
    expected = LaunchShape(
        number=scheduler.ledger.launched + 1,
        sample_rows=slots.size if samples.any() else 0,
        form=Form.FULL if scheduler.rows.needs_full[slots[samples]].any() else Form.PLAIN,
        rows=launch.row_slots.size,
        tokens=int(counts.sum()),
        is_decode=counts.size > 0 and bool((counts == per_row).all()),
        drafts=drafts,
        sample_drafts=scheduler.ledger.last_drafts if samples.any() else 0,
        masked=bool(scheduler.rows.may_hold[slots[samples]].any()),
        forced=drafts > guesses == 0,
        prompt_logprobs=any(request is not None and request.wants_prompt_logprobs for request in asking),
    )
    assert launch.shape == expected, f"launch {launch.number} has the shape {launch.shape} and should have {expected}"
    return _form(launch, scheduler, decoding.size, len(chunks))


def _drafts(launch: Launch, scheduler: HeldToItsWord, decoding: NDArray[np.int32], chunks: int) -> tuple[int, int]:
    """Drafts of each of the rows that decode, [n], beside so many chunks, and of these, guesses.

    They are chosen for the rows that might be in the launch when its plan was begun: a row that then found no block, or
    was told to leave, or had no place in the plan, counts like those that decode, or like those with a chunk. Of rows
    that begin with the launch it is known only afterwards whether they do: they count where they do. What a grammar may
    force is drafted where one of those that do decode has a grammar.
    """
    limits, rows = scheduler.limits, scheduler.may_decode
    if not decoding.size or (limits.draft_rows and (chunks or scheduler.prompts or rows > limits.draft_rows)):
        return 0, 0
    guesses = scheduler.choice.drafts(launch.number, rows)
    has_grammar = rows <= limits.forced_rows and scheduler.rows.may_hold[decoding].any()
    return max(guesses, limits.forced_drafts if has_grammar else 0), guesses


def _form(launch: Launch, scheduler: HeldToItsWord, decoding: int, chunks: int) -> str:
    """Why a launch of so many rows that decode, and so many chunks, has drafts or none, where those with drafts are
    forms; nothing where any launch may have some, or where none were chosen."""
    limits = scheduler.limits
    if launch.shape.drafts and limits.draft_rows:
        return "form with drafts"
    if not limits.draft_rows or not decoding or not scheduler.choice.drafts(launch.number, decoding):
        return ""
    if chunks and not scheduler.prompts and scheduler.may_decode <= limits.draft_rows:
        return "drafts given up for a row that began"
    if not chunks and scheduler.prompts:
        return "no drafts beside a prompt that found no room"
    if not chunks and decoding <= limits.draft_rows < scheduler.may_decode:
        return "no drafts beside a row that found no block"
    return "no drafts in so many rows" if decoding > limits.draft_rows else ""
