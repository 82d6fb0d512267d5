"""Front ends that follow the prefix cache, and the next changes for each.

A front end asks and is answered when something has changed, with a bounded number of changes. So the engine keeps only
a bounded record, which all followers share, and records nothing without followers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from runahead.runtime.engine.links import Links
from runahead.runtime.memory.block_changes import BlockChanges
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.wire.block_keys import Content
from runahead.runtime.wire.kv_events import KvChange, kv_reply

RECORDED: Final = 1 << 16  # changes that a front end may be behind
_MOST_CHANGES: Final = 512  # changes in a reply, and blocks scanned for one


@dataclass(slots=True)
class _Follower:
    """A follower. position: the next change; -1: it knows nothing yet. scanned: blocks and snapshots whose present
    contents it has been sent. call: the call that waits for an answer."""

    position: int = -1
    scanned: int = 0
    call: int | None = None


class KvFollowers:
    """Followers of the prefix cache. pools: KV blocks, and snapshots of states. recorded: changes that a follower may
    be behind."""

    def __init__(self, links: Links, pools: tuple[BlockPool, BlockPool], recorded: int = RECORDED) -> None:
        self._links = links
        self._pools = pools
        self._recorded = recorded
        self._changes = BlockChanges(recorded)
        self._followers: dict[int, _Follower] = {}  # by front end

    def ask(self, owner: int, call: int) -> None:
        """Record a front end's question. It follows from the first one on."""
        if not self._followers:
            self._changes = BlockChanges(self._recorded)
            for pool in self._pools:
                pool.changes = self._changes
        self._followers.setdefault(owner, _Follower()).call = call

    def lose(self, owner: int) -> None:
        """Forget a front end that is gone."""
        if self._followers.pop(owner, None) is not None and not self._followers:
            for pool in self._pools:
                pool.changes = None

    def answer(self) -> None:
        """Answer the waiting followers for which there is something new."""
        if not self._followers:
            return
        for owner, follower in self._followers.items():
            if follower.call is not None:
                self._answer(owner, follower, follower.call)
        self._changes.drop(min(follower.position for follower in self._followers.values()))

    @property
    def has_more(self) -> bool:
        """Return whether a waiting follower can be answered at once."""
        return any(
            follower.call is not None and (follower.position < self._changes.end or self._left(follower))
            for follower in self._followers.values()
        )

    def _answer(self, owner: int, follower: _Follower, call: int) -> None:
        new = self._changes.since(follower.position, _MOST_CHANGES)
        cleared = new is None
        if new is None:
            follower.position, follower.scanned, new = self._changes.end, 0, []
        follower.position += len(new)
        found = [_told(change.group, change.is_stored, change.content) for change in new]
        is_scanning = bool(self._left(follower))
        if follower.position == self._changes.end:  # the scan is as new as the changes
            found += self._scan(follower)
        if found or cleared or is_scanning:
            follower.call = None
            is_whole = follower.position == self._changes.end and not self._left(follower)
            self._links.send(owner, kv_reply(call, cleared, is_whole, found))

    def _left(self, follower: _Follower) -> int:
        """Return how many blocks and snapshots are still to be scanned."""
        return sum(pool.total for pool in self._pools) - follower.scanned

    def _scan(self, follower: _Follower) -> list[KvChange]:
        """Return some of the present contents."""
        before = 0
        for pool in self._pools:
            begin = follower.scanned - before
            if begin < pool.total:
                end = min(begin + _MOST_CHANGES, pool.total)
                follower.scanned += end - begin
                contents = pool.unsalted_contents(begin + 1, end + 1)  # block 0 is the null block
                return [_told(pool.group, True, content) for content in contents]
            before += pool.total
        return []


def _told(group: int, is_stored: bool, content: Content) -> KvChange:
    if not is_stored:
        return KvChange(False, bool(group), content.key)
    return KvChange(True, bool(group), content.key, content.before, b"" if group else content.tokens)
