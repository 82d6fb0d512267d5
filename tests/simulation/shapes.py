"""The shape that a device is told, worked out once more from what the launch's rows are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import RingMemory
from runahead.cuda_graphs.shape import Form, LaunchShape
from runahead.runtime.plan import CHUNK_ROW, CHUNK_TOKENS, read_plan
from runahead.runtime.scheduler.ledger import Launch
from runahead.runtime.scheduler.rows import RowPhase
from runahead.runtime.scheduler.scheduler import Scheduler


def check_shape(launch: Launch, rings: RingMemory, scheduler: Scheduler) -> None:
    """Of a launch whose plan was staged and that the ledger does not know yet."""
    chunks = read_plan(rings.plan[rings.slot(launch.number)]).chunks
    per_row = 1 + launch.shape.drafts
    counts = np.full(launch.row_slots.size, per_row)
    counts[chunks[:, CHUNK_ROW]] = chunks[:, CHUNK_TOKENS]
    asking = [scheduler.holdings.by_slot[slot] for slot in launch.row_slots[chunks[:, CHUNK_ROW]].tolist()]
    slots, _, samples = scheduler.ledger.last_rows()
    expected = LaunchShape(
        number=scheduler.ledger.launched + 1,
        sample_rows=slots.size if samples.any() else 0,
        form=Form.FULL if scheduler.rows.needs_full[slots[samples]].any() else Form.PLAIN,
        rows=launch.row_slots.size,
        tokens=int(counts.sum()),
        is_decode=counts.size > 0 and bool((counts == per_row).all()),
        drafts=_drafts(launch, scheduler, np.delete(launch.row_slots, chunks[:, CHUNK_ROW]), len(chunks)),
        sample_drafts=scheduler.ledger.last_drafts if samples.any() else 0,
        masked=bool(scheduler.rows.may_hold[slots[samples]].any()),
        forced=launch.shape.drafts > 0 and not launch.guesses,
        prompt_logprobs=any(request is not None and request.wants_prompt_logprobs for request in asking),
    )
    assert launch.shape == expected, f"launch {launch.number} has the shape {launch.shape} and should have {expected}"


def _drafts(launch: Launch, scheduler: Scheduler, decoding: NDArray[np.int32], chunks: int) -> int:
    """Of the rows that decode, [n], beside so many chunks. How many of those that may be left out count is the
    scheduler's to say."""
    if scheduler.limits.draft_rows and (chunks or decoding.size > scheduler.limits.draft_rows):
        return 0
    phases = scheduler.rows.phase
    if scheduler.limits.draft_rows and not launch.shape.drafts and (phases == RowPhase.PREFILL).any():
        return 0  # a chunk that might have come found no room
    if scheduler.limits.draft_rows and not launch.shape.drafts and (phases == RowPhase.LEAVING).any():
        return 0  # it was of the row that had to leave for another
    guesses = scheduler.drafts.choose(launch.number, decoding.size, 0) if decoding.size else 0
    if not scheduler.rows.may_hold[decoding].any():
        return guesses
    forced = max(guesses, scheduler.limits.forced_drafts if decoding.size <= scheduler.limits.forced_rows else 0)
    return launch.shape.drafts if launch.shape.drafts in (guesses, forced) else forced
