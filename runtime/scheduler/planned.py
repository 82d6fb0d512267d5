"""A launch's plan with everything that planning it has brought about, and the ledger's record that is made of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.shape import LaunchShape
from runahead.runtime.plan import LaunchPlan
from runahead.runtime.scheduler.ledger import NO_EPOCHS, NO_SLOTS, Launch
from runahead.runtime.scheduler.outcomes import PromptPart


class Planned(NamedTuple):
    """A plan, and what the host alone has to know of its launch.

    sample_slots, sample_epochs, samples, row_epochs, crossed_slots, crossed_epochs, prompt_parts, sample_guesses: see
    `Launch`. events: lifecycle events by kind since the plan before, those of making this one among them.
    """

    plan: LaunchPlan
    sample_slots: NDArray[np.int32]
    sample_epochs: NDArray[np.int64]
    samples: NDArray[np.bool_]
    row_epochs: NDArray[np.int64]
    events: Mapping[str, int]
    crossed_slots: NDArray[np.int32] = NO_SLOTS
    crossed_epochs: NDArray[np.int64] = NO_EPOCHS
    prompt_parts: tuple[PromptPart, ...] = ()
    sample_guesses: int = 0


def launch_of(planned: Planned, shape: LaunchShape, *, first: bool, overlapped: bool, calls: int = 1) -> Launch:
    """The ledger's record of a plan. shape: as the device is told, read from the staged plan. first, overlapped, calls:
    see `Launch`."""
    plan = planned.plan
    return Launch(
        shape=shape,
        sample_slots=planned.sample_slots,
        sample_epochs=planned.sample_epochs,
        samples=planned.samples,
        row_slots=plan.rows,
        row_epochs=planned.row_epochs,
        row_samples=plan.samples,
        crossed_slots=planned.crossed_slots,
        crossed_epochs=planned.crossed_epochs,
        prompt_parts=planned.prompt_parts,
        guesses=plan.guesses,
        sample_guesses=planned.sample_guesses,
        prompt_tokens=sum(chunk.tokens.size for chunk in plan.chunks) if plan.chunks else 0,
        overlapped=overlapped,
        first=first,
        calls=calls,
    )
