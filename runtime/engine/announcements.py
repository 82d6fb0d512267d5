"""Requests that front ends have announced: their ids are taken, and nothing else is known of them yet."""

from __future__ import annotations

from dataclasses import dataclass, field


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
