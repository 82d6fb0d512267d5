"""The engine's registry: announced requests, live requests, those with a grammar, and ids that are finished or aborted
early.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from runahead.runtime.masks.masks import Masks, Stops
from runahead.runtime.memory.block_pool import NO_SLOT
from runahead.runtime.scheduler.holdings import Holdings
from runahead.runtime.scheduler.outcomes import Commit
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import RowPhase
from runahead.runtime.wire.parameters import FinishReason, WaitReason

Reasons = tuple[WaitReason, WaitReason]
Waited = tuple[float, ...]  # seconds, by WaitReason
_NOBODY: Final = (WaitReason.LAUNCH, WaitReason.LAUNCH)

_FENCED: Final = int(RowPhase.FENCED)


class WaitTimes:
    """Seconds for which each reason has held so far, in all. A request compares two readings.

    Requests that need a penalty slot may wait for something else than others. Times are on the engine's clock.
    """

    def __init__(self) -> None:
        self._reasons: Reasons = _NOBODY
        self._since = 0.0
        self._totals = [0.0] * len(WaitReason), [0.0] * len(WaitReason)

    def planned(self, reasons: Reasons, now: float) -> None:
        """A plan was made now. reasons: of `WaitingQueue.reasons`."""
        if reasons != self._reasons:
            self._add_up(now)
            self._reasons = reasons

    def read(self, has_penalty: bool, now: float) -> Waited:
        """Return the seconds of each reason, for a request with or without penalties."""
        self._add_up(now)
        return tuple(self._totals[has_penalty])

    def begin(self, has_penalty: bool, now: float, sent_at: float) -> Waited:
        """Return the reading with which a request's wait begins. sent_at: when its front end sent the request, which
        has waited for the intake since then."""
        reading = list(self.read(has_penalty, now))
        reading[WaitReason.INTAKE] -= now - sent_at
        return tuple(reading)

    def longest(self, before: Waited, has_penalty: bool, now: float) -> tuple[WaitReason, float]:
        """Return the reason that held longest since `before` was read, and its seconds."""
        waited = [after - then for after, then in zip(self.read(has_penalty, now), before, strict=True)]
        return max(zip(WaitReason, waited, strict=True), key=lambda entry: entry[1])

    def _add_up(self, now: float) -> None:
        for totals, reason in zip(self._totals, self._reasons, strict=True):
            totals[reason] += now - self._since
        self._since = now


@dataclass(frozen=True, slots=True)
class Announced:
    """A request whose prompt its front end is preparing.

    submitted_at: in seconds on the engine's clock. n: its completions.
    """

    owner: int
    handle: int
    request_id: str
    submitted_at: float
    n: int = 1


@dataclass(slots=True)
class Announcements:
    """Announced requests. Checks of messages bound their number for each front end."""

    _by_id: dict[str, Announced] = field(default_factory=dict)
    _by_owner: dict[int, dict[int, Announced]] = field(default_factory=dict)  # by handle

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, announced: Announced) -> None:
        """Add a request. Its id must be new."""
        self._by_id[announced.request_id] = announced
        self._by_owner.setdefault(announced.owner, {})[announced.handle] = announced

    def take(self, owner: int, handle: int) -> Announced | None:
        """Remove and return an announced request; None if it is not announced."""
        own = self._by_owner.get(owner, {})
        announced = own.pop(handle, None)
        if announced is not None:
            del self._by_id[announced.request_id]
            if not own:
                del self._by_owner[owner]
        return announced

    def by_id(self, request_id: str) -> Announced | None:
        return self._by_id.get(request_id)

    def ids(self) -> tuple[str, ...]:
        """Return all ids, the oldest first."""
        return tuple(self._by_id)

    def of_owner(self, owner: int) -> list[Announced]:
        """Return the announced requests of one front end."""
        return list(self._by_owner.get(owner, {}).values())


@dataclass(slots=True)
class RememberedIds:
    """Ids, each with a time in seconds. most: the number of ids of all callers. An id names its caller up to its first
    slash.

    When there are too many, the oldest id of a caller with an equal number or more is forgotten, so that no caller can
    displace the others' ids.
    """

    most: int
    _by_caller: dict[str, OrderedDict[str, float]] = field(default_factory=dict)  # none of them is empty
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_caller.get(_caller(request_id), ())

    def add(self, request_id: str, time_s: float) -> None:
        """Add an id as the newest of its caller, even if it was there."""
        caller = _caller(request_id)
        own = self._by_caller.setdefault(caller, OrderedDict())
        is_at_quota = len(own) * len(self._by_caller) >= self.most
        self._count += request_id not in own
        own[request_id] = time_s
        own.move_to_end(request_id)
        if self._count > self.most:
            self._forget_oldest(caller if is_at_quota else self._greediest())

    def pop(self, request_id: str) -> float | None:
        """Remove an id and return its time; None if it was not there."""
        caller = _caller(request_id)
        if request_id not in self._by_caller.get(caller, ()):
            return None
        time_s = self._by_caller[caller].pop(request_id)
        self._forgot_one_of(caller)
        return time_s

    def _greediest(self) -> str:
        """Return the caller with the most ids. Called only for callers below the quota."""
        return max(self._by_caller, key=lambda caller: len(self._by_caller[caller]))

    def _forget_oldest(self, caller: str) -> None:
        self._by_caller[caller].popitem(last=False)
        self._forgot_one_of(caller)

    def _forgot_one_of(self, caller: str) -> None:
        self._count -= 1
        if not self._by_caller[caller]:
            del self._by_caller[caller]


def _caller(request_id: str) -> str:
    """Return the caller in an id. Without authentication it is empty, and all ids are one caller's."""
    return request_id[: request_id.find("/") + 1]


# Bounds on remembered ids of finished requests, and of requests aborted before they arrived.
MAX_REMEMBERED = 8192
EARLY_ABORT_S = 60.0


def _nobody_else(request: Request) -> None:
    pass


@dataclass(slots=True, eq=False)
class Tracked:
    """A live request and its times, in seconds on the engine's clock. 0: not yet.

    waited_before: what `WaitTimes` read when it was queued.
    """

    request: Request
    submitted_at: float
    waited_before: Waited
    admitted_at: float = 0.0
    first_token_at: float = 0.0


@dataclass(slots=True)
class Registry:
    """Live requests, announced requests, finished ids, and ids that were aborted before they arrived.

    removed: called with each removed request.
    """

    removed: Callable[[Request], None] = _nobody_else
    announced: Announcements = field(default_factory=Announcements)

    _by_owner: defaultdict[int, dict[int, Tracked]] = field(default_factory=lambda: defaultdict(dict))  # by handle
    _by_id: dict[str, list[Tracked]] = field(default_factory=dict)  # the completions of a prompt have one id
    _count: int = 0
    _finished: RememberedIds = field(default_factory=lambda: RememberedIds(MAX_REMEMBERED))
    _aborted_early: RememberedIds = field(default_factory=lambda: RememberedIds(MAX_REMEMBERED))

    def __len__(self) -> int:
        return self._count

    def add(self, tracked: Tracked) -> None:
        request = tracked.request
        self._by_owner[request.owner][request.handle] = tracked
        self._by_id.setdefault(request.request_id, []).append(tracked)
        self._count += 1

    def remove(self, request: Request) -> None:
        """Remove a request that has ended. Its id counts as finished unless another completion has it."""
        own = self._by_owner[request.owner]
        tracked = own.pop(request.handle)
        if not own:
            del self._by_owner[request.owner]
        same = self._by_id[request.request_id]
        same.remove(tracked)
        if not same:
            del self._by_id[request.request_id]
            self.remember_finished(request.request_id)
        self._count -= 1
        self.removed(request)

    def by_handle(self, owner: int, handle: int) -> Tracked | None:
        return self._by_owner[owner].get(handle) if owner in self._by_owner else None

    def by_id(self, request_id: str) -> Tracked | None:
        """Return the first live completion of this id, or None."""
        return next(iter(self._by_id.get(request_id, ())), None)

    def all_of(self, request_id: str) -> list[Tracked]:
        """Return the live completions of this id, by index."""
        return self._by_id.get(request_id, [])[:]

    def is_taken(self, request_id: str) -> bool:
        """Return whether a request with this id is live or announced."""
        return request_id in self._by_id or self.announced.by_id(request_id) is not None

    def ids(self) -> tuple[str, ...]:
        """Return the ids of all live requests, then of announced ones."""
        return (*self._by_id, *self.announced.ids())

    def all(self) -> list[Tracked]:
        """Return all live requests."""
        return [tracked for same in self._by_id.values() for tracked in same]

    def of_owner(self, owner: int) -> list[Tracked]:
        """Return the live requests of one front end."""
        return list(self._by_owner[owner].values()) if owner in self._by_owner else []

    def remember_finished(self, request_id: str) -> None:
        """Remember that a request with this id has ended."""
        self._finished.add(request_id, 0.0)

    def has_finished(self, request_id: str) -> bool:
        return request_id in self._finished

    def abort_early(self, request_id: str, now: float) -> None:
        """Remember that this id is aborted if it still arrives."""
        self._aborted_early.add(request_id, now + EARLY_ABORT_S)

    def was_aborted_early(self, request_id: str, submitted_at: float) -> bool:
        """Return whether this id was aborted before its request arrived, at most EARLY_ABORT_S before its submission.

        An early abort is forgotten by this call: it applies to one request only.
        """
        until = self._aborted_early.pop(request_id)
        return until is not None and until > submitted_at


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
