"""The contents that join the prefix cache and leave it, in order, for followers.

Only contents with the empty salt are recorded. A follower has a position and reads the changes from there. The record
is bounded: a follower that falls behind by more than `limit` changes has lost some, and begins anew.
"""

from __future__ import annotations

from typing import NamedTuple

from runahead.runtime.wire.prompts import Content


class Change(NamedTuple):
    """A change of the prefix cache. group: the pool's. is_stored: the content can be found from now on; else it was
    forgotten."""

    group: int
    is_stored: bool
    content: Content


class BlockChanges:
    """A bounded record of changes. Positions count up from 0."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._begin = 0  # the position of the oldest recorded change
        self._changes: list[Change] = []

    @property
    def end(self) -> int:
        """The position behind the newest change."""
        return self._begin + len(self._changes)

    def record(self, group: int, is_stored: bool, content: Content) -> None:
        """Record a change, unless its salt is not empty."""
        if content.unsalted:
            if len(self._changes) == self._limit:
                self.drop(self.end)
            self._changes.append(Change(group, is_stored, content))

    def since(self, position: int, most: int) -> list[Change] | None:
        """Return the next changes from this position on, `most` at most; None if some are no longer recorded."""
        if position < self._begin:
            return None
        return self._changes[position - self._begin : position - self._begin + most]

    def drop(self, position: int) -> None:
        """Drop the changes before this position."""
        if position > self._begin:
            del self._changes[: position - self._begin]
            self._begin = position
