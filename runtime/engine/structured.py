"""Requests with a grammar, and what whoever makes their masks is told of them."""

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
    """requests: those that live, by their `Request.order`. While there are none, nothing here need be called."""

    def __init__(self, masks: Masks, holdings: Holdings, limits: SchedulerLimits) -> None:
        self.requests: dict[int, Request] = {}
        self.masks = masks
        self._holdings = holdings
        self._eos_token_ids = limits.eos_token_ids
        self._forced_rows = limits.forced_rows if limits.forced_drafts else 0

    def begin(self, request: Request, grammar: str) -> None:
        """It was queued."""
        self.requests[request.order] = request
        stopping = request.stopping
        stops = tuple(one for one in stopping.stop_token_ids if one not in self._eos_token_ids)
        self.masks.open(request.order, grammar, Stops(stops, request.prompt.size + stopping.min_tokens))

    def admitted(self, request: Request) -> None:
        """A launch holds its row, its first one or another."""
        if request.may_hold and request.row_slot != NO_SLOT:
            epoch = int(self._holdings.rows.epoch[request.row_slot])
            self.masks.place(request.order, request.row_slot, epoch, request.tokens)

    def committed(self, commit: Commit, drafts: int, guesses: int) -> None:
        """A launch has brought tokens. Who has ended with one has no next position. drafts: of each row in its F, at
        most; guesses: of these, those that its drafter has made.

        Where few rows go on, the next launch may have drafts though this one has none: what must come is looked for.
        """
        rows, slots = self._holdings.rows, commit.slots
        goes_on = rows.may_hold[slots] & (rows.phase[slots] != _FENCED)
        if np.count_nonzero(goes_on):
            soon = drafts > 0 or rows.decoding().size <= self._forced_rows
            self.masks.take(rows.order[slots[goes_on]], commit.tokens[goes_on], drafts, guesses, soon=soon)

    def ended(self, request: Request) -> None:
        """It has ended, for whatever reason."""
        if self.requests.pop(request.order, None) is not None:
            self.masks.close(request.order)

    def lost(self, now: float) -> Sequence[tuple[Request, FinishReason]]:
        """Those that no masks will come for any more, and how they end. now: seconds on the engine's clock."""
        return [(self.requests[order], reason) for order, reason in self.masks.look(now) if order in self.requests]
