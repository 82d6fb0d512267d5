"""Which requests the service knows, by id and by the front end's handle: what is service-wide lives here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from runahead.runtime.engine.announcements import Announcements
from runahead.runtime.engine.remembered_ids import RememberedIds
from runahead.runtime.scheduler.request import Request

# How many ids of finished requests, and of requests aborted before they arrived, are remembered, and how long.
MAX_REMEMBERED = 8192
EARLY_ABORT_S = 60.0


def _nobody_else(request: Request) -> None:
    pass


@dataclass(slots=True, eq=False)
class Tracked:
    """A live request and when things happened to it, in seconds on the engine's clock. 0: not yet."""

    request: Request
    submitted_at: float
    admitted_at: float = 0.0
    first_token_at: float = 0.0


@dataclass(slots=True)
class Registry:
    """Live requests, those that are announced, ids that have finished, and ids aborted before they arrived.

    removed: is told of each request that was removed.
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
        """The request has ended; its id is remembered as finished, unless another completion has it."""
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
        """The first completion of this id that lives."""
        return next(iter(self._by_id.get(request_id, ())), None)

    def all_of(self, request_id: str) -> list[Tracked]:
        """The completions of this id that live, by index."""
        return self._by_id.get(request_id, [])[:]

    def is_taken(self, request_id: str) -> bool:
        """A request with this id lives, or is announced."""
        return request_id in self._by_id or self.announced.by_id(request_id) is not None

    def ids(self) -> tuple[str, ...]:
        """Of all that live now, and then of those that are announced."""
        return (*self._by_id, *self.announced.ids())

    def all(self) -> list[Tracked]:
        """All that live now."""
        return [tracked for same in self._by_id.values() for tracked in same]

    def of_owner(self, owner: int) -> list[Tracked]:
        """Those of one front end that live now."""
        return list(self._by_owner[owner].values()) if owner in self._by_owner else []

    def remember_finished(self, request_id: str) -> None:
        """A request with this id has ended."""
        self._finished.add(request_id, 0.0)

    def has_finished(self, request_id: str) -> bool:
        return request_id in self._finished

    def abort_early(self, request_id: str, now: float) -> None:
        """Remember that this id is aborted, should it still arrive."""
        self._aborted_early.add(request_id, now + EARLY_ABORT_S)

    def was_aborted_early(self, request_id: str, submitted_at: float) -> bool:
        """Was this id aborted before its request came, and at most EARLY_ABORT_S before that was submitted?

        An early abort is forgotten when it was asked for: it is meant for one request, whatever becomes of it.
        """
        until = self._aborted_early.pop(request_id)
        return until is not None and until > submitted_at
