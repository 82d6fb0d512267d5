"""Ids of requests that are gone, or not there yet: as many as there is room for, shared between the callers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


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
