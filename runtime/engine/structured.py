"""Requests with a grammar, and their messages to the mask maker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from runahead.runtime.masks.masks import Masks, Stops
from runahead.runtime.memory.slot_pool import NO_SLOT
from runahead.runtime.scheduler.holdings import Holdings
from runahead.runtime.scheduler.outcomes import Commit
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import RowPhase
from runahead.runtime.wire.parameters import FinishReason

_FENCED: Final = int(RowPhase.FENCED)


class Structured:
    """Live requests with a grammar, by `Request.order`. Without any, no method needs to be called."""

    def __init__(self, masks: Masks, holdings: Holdings, limits: SchedulerLimits) -> None:
        self.requests: dict[int, Request] = {}
        self.masks = masks
        self._holdings = holdings
        self._eos_token_ids = limits.eos_token_ids
        self._forced_rows = limits.forced_rows if limits.forced_drafts else 0

    def begin(self, request: Request, grammar: str) -> None:
        """Open a queued request's grammar."""
        self.requests[request.order] = request
        stopping = request.stopping
        stops = tuple(one for one in stopping.stop_token_ids if one not in self._eos_token_ids)
        self.masks.open(request.order, grammar, Stops(stops, request.prompt.size + stopping.min_tokens))

    def admitted(self, request: Request) -> None:
        """Report the request's row, when a launch has it."""
        if request.may_hold and request.row_slot != NO_SLOT:
            epoch = int(self._holdings.rows.epoch[request.row_slot])
            self.masks.place(request.order, request.row_slot, epoch, request.tokens)

    def committed(self, commit: Commit, drafts: int, guesses: int) -> None:
        """Report a launch's tokens of rows that go on. An ended row has no next position.

        drafts: most drafts of a row in its F. guesses: of these, guesses of the drafter. With few rows the next launch
        may have drafts though this one has none, so forced tokens are then looked for.
        """
        rows, slots = self._holdings.rows, commit.slots
        goes_on = rows.may_hold[slots] & (rows.phase[slots] != _FENCED)
        if np.count_nonzero(goes_on):
            soon = drafts > 0 or rows.decoding().size <= self._forced_rows
            self.masks.take(rows.order[slots[goes_on]], commit.tokens[goes_on], drafts, guesses, soon=soon)

    def ended(self, request: Request) -> None:
        """Close the request's grammar, when it has ended for any reason."""
        if self.requests.pop(request.order, None) is not None:
            self.masks.close(request.order)

    def lost(self, now: float) -> Sequence[tuple[Request, FinishReason]]:
        """Return the requests that will get no more masks, and their finish reasons. now: seconds on the engine's
        clock."""
        return [(self.requests[order], reason) for order, reason in self.masks.given_up(now) if order in self.requests]
