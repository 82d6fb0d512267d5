"""Which contents become findable in the prefix cache and which are forgotten, in order, for those who follow it.

Only contents of the empty salt are recorded. Whoever follows has a position, and takes what was recorded behind it. The
record is bounded: who stays behind by more than `limit` changes has lost some, and begins anew.
"""

from __future__ import annotations

from typing import NamedTuple

from runahead.runtime.wire.block_keys import Content


class Change(NamedTuple):
    """group: of the pool. is_stored: the content can be found from now on; else it was forgotten."""

    group: int
    is_stored: bool
    content: Content


class BlockChanges:
    """Positions count up from 0."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._begin = 0  # the position of the oldest change that is there
        self._changes: list[Change] = []

    @property
    def end(self) -> int:
        """The position behind the newest change."""
        return self._begin + len(self._changes)

    def record(self, group: int, is_stored: bool, content: Content) -> None:
        """A change, unless it is of another salt than the empty one."""
        if content.unsalted:
            if len(self._changes) == self._limit:
                self.drop(self.end)
            self._changes.append(Change(group, is_stored, content))

    def since(self, position: int, most: int) -> list[Change] | None:
        """The next changes from this position on, `most` at most. None: some of them are not there any more."""
        if position < self._begin:
            return None
        return self._changes[position - self._begin : position - self._begin + most]

    def drop(self, position: int) -> None:
        """Changes before this position are not asked for any more."""
        if position > self._begin:
            del self._changes[: position - self._begin]
            self._begin = position
