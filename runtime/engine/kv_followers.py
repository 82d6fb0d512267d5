"""Front ends that follow the prefix cache: what each has been told, and what is next.

A front end asks, and is answered once something has changed, with a bounded number of changes. So the engine keeps
nothing for one that does not ask, but for the bounded record that all share; and nothing is recorded while nobody
follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from runahead.runtime.engine.links import Links
from runahead.runtime.memory.block_changes import BlockChanges
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.wire.block_keys import Content
from runahead.runtime.wire.kv_events import KvChange, kv_reply

RECORDED: Final = 1 << 16  # changes that a front end may stay behind
_TOLD: Final = 512  # changes in a reply, and blocks that are looked at for one


@dataclass(slots=True)
class _Follower:
    """position: of the next change; -1: it knows nothing yet. looked: blocks and snapshots that were looked at to tell
    what is there already. call: that waits for an answer."""

    position: int = -1
    looked: int = 0
    call: int | None = None


class KvFollowers:
    """pools: of KV blocks, and of snapshots of states. recorded: changes that a follower may stay behind."""

    def __init__(self, links: Links, pools: tuple[BlockPool, BlockPool], recorded: int = RECORDED) -> None:
        self._links = links
        self._pools = pools
        self._recorded = recorded
        self._changes = BlockChanges(recorded)
        self._followers: dict[int, _Follower] = {}  # by front end

    def ask(self, owner: int, call: int) -> None:
        """A front end follows from its first question on."""
        if not self._followers:
            self._changes = BlockChanges(self._recorded)
            for pool in self._pools:
                pool.changes = self._changes
        self._followers.setdefault(owner, _Follower()).call = call

    def lose(self, owner: int) -> None:
        """The front end is gone."""
        if self._followers.pop(owner, None) is not None and not self._followers:
            for pool in self._pools:
                pool.changes = None

    def answer(self) -> None:
        """Those who wait and for whom there is something."""
        if not self._followers:
            return
        for owner, follower in self._followers.items():
            if follower.call is not None:
                self._answer(owner, follower, follower.call)
        self._changes.drop(min(follower.position for follower in self._followers.values()))

    @property
    def has_more(self) -> bool:
        """A follower that waits can be told something at once."""
        return any(
            follower.call is not None and (follower.position < self._changes.end or self._left(follower))
            for follower in self._followers.values()
        )

    def _answer(self, owner: int, follower: _Follower, call: int) -> None:
        new = self._changes.since(follower.position, _TOLD)
        cleared = new is None
        if new is None:
            follower.position, follower.looked, new = self._changes.end, 0, []
        follower.position += len(new)
        found = [_told(change.group, change.is_stored, change.content) for change in new]
        looks = bool(self._left(follower))
        if follower.position == self._changes.end:  # what is looked at now is as new as what was told
            found += self._look(follower)
        if found or cleared or looks:
            follower.call = None
            is_whole = follower.position == self._changes.end and not self._left(follower)
            self._links.send(owner, kv_reply(call, cleared, is_whole, found))

    def _left(self, follower: _Follower) -> int:
        """Blocks and snapshots that are still to be looked at."""
        return sum(pool.total for pool in self._pools) - follower.looked

    def _look(self, follower: _Follower) -> list[KvChange]:
        """Some of what is there already."""
        before = 0
        for pool in self._pools:
            begin = follower.looked - before
            if begin < pool.total:
                end = min(begin + _TOLD, pool.total)
                follower.looked += end - begin
                contents = pool.unsalted_contents(begin + 1, end + 1)  # place 0 is nobody's
                return [_told(pool.group, True, content) for content in contents]
            before += pool.total
        return []


def _told(group: int, is_stored: bool, content: Content) -> KvChange:
    if not is_stored:
        return KvChange(False, bool(group), content.key)
    return KvChange(True, bool(group), content.key, content.before, b"" if group else content.tokens)
