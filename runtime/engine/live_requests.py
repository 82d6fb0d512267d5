"""Which requests the engine knows: announced ones, live ones, and ids that are gone or not there yet."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from runahead.runtime.engine.wait_times import Waited
from runahead.runtime.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Announced:
    """A request whose prompt is being prepared in its front end. n: its completions."""

    owner: int
    handle: int
    request_id: str
    n: int = 1


@dataclass(slots=True)
class Announcements:
    """How many there may be of a front end is bounded where its messages are checked."""

    _by_id: dict[str, Announced] = field(default_factory=dict)
    _by_owner: dict[int, dict[int, Announced]] = field(default_factory=dict)  # by handle

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, announced: Announced) -> None:
        """Its id must not be there."""
        self._by_id[announced.request_id] = announced
        self._by_owner.setdefault(announced.owner, {})[announced.handle] = announced

    def take(self, owner: int, handle: int) -> Announced | None:
        """It is announced no more. None: it was not there, or not any more."""
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
        """Of all, the oldest first."""
        return tuple(self._by_id)

    def of_owner(self, owner: int) -> list[Announced]:
        """Those of one front end."""
        return list(self._by_owner.get(owner, {}).values())


@dataclass(slots=True)
class RememberedIds:
    """Each id with a time, in seconds. most: how many, of all callers; an id is its caller's up to its first slash.

    When there are too many, the oldest is forgotten of a caller who has an equal share or more of them: whatever one
    caller adds, the others keep theirs.
    """

    most: int
    _by_caller: dict[str, OrderedDict[str, float]] = field(default_factory=dict)  # none of them is empty
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_caller.get(_caller(request_id), ())

    def add(self, request_id: str, time_s: float) -> None:
        """The newest of its caller, also if it was there."""
        caller = _caller(request_id)
        own = self._by_caller.setdefault(caller, OrderedDict())
        has_its_share = len(own) * len(self._by_caller) >= self.most
        self._count += request_id not in own
        own[request_id] = time_s
        own.move_to_end(request_id)
        if self._count > self.most:
            self._forget_oldest(caller if has_its_share else self._greediest())

    def pop(self, request_id: str) -> float | None:
        """Its time, once: it is forgotten with that. None: it was not there."""
        caller = _caller(request_id)
        if request_id not in self._by_caller.get(caller, ()):
            return None
        time_s = self._by_caller[caller].pop(request_id)
        self._forgot_one_of(caller)
        return time_s

    def _greediest(self) -> str:
        """Looked for by a caller who has less than a share, which is soon over."""
        return max(self._by_caller, key=lambda caller: len(self._by_caller[caller]))

    def _forget_oldest(self, caller: str) -> None:
        self._by_caller[caller].popitem(last=False)
        self._forgot_one_of(caller)

    def _forgot_one_of(self, caller: str) -> None:
        self._count -= 1
        if not self._by_caller[caller]:
            del self._by_caller[caller]


def _caller(request_id: str) -> str:
    """None is a caller too: where nobody is asked who they are, all ids are that one's."""
    return request_id[: request_id.find("/") + 1]


# How many ids of finished requests, and of requests aborted before they arrived, are remembered, and how long.
MAX_REMEMBERED = 8192
EARLY_ABORT_S = 60.0


def _nobody_else(request: Request) -> None:
    pass


@dataclass(slots=True, eq=False)
class Tracked:
    """A live request and when things happened to it, in seconds on the engine's clock. 0: not yet.

    waited_before: what `WaitTimes` read when it was queued.
    """

    request: Request
    submitted_at: float
    waited_before: Waited
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
