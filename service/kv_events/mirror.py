"""A copy of the prefix cache's contents, from the engine's events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from runahead.runtime.wire.kv_events import KvChange
from runahead.service.kv_events.events import Event, Removed, Stored


class KvMirror:
    """The blocks of the empty salt that a prompt can begin with.

    needs_snapshots: the model has recurrent states. A cached prefix then ends at a snapshot of the state, so a block
    counts if it or a later block of its chain has one.
    """

    def __init__(self, needs_snapshots: bool) -> None:
        self._needs_snapshots = needs_snapshots
        self._blocks: dict[bytes, Stored] = {}  # blocks that count, by key, in the order in which they began to
        self._there: dict[bytes, Stored] = {}  # all blocks of the engine's cache
        self._snapshots: set[bytes] = set()  # snapshots, by the key of the preceding block
        self._followed: defaultdict[bytes, int] = defaultdict(int)  # counting blocks directly after a counting block

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Forget all blocks."""
        for known in (self._blocks, self._there, self._snapshots, self._followed):
            known.clear()

    def apply(self, changes: Iterable[KvChange]) -> list[Event]:
        """Apply changes and return the router's events, parents before children. A repeated change counts once."""
        events: list[Event] = []
        for change in changes:
            if not change.is_snapshot:
                if change.is_stored:
                    self._there[change.key] = Stored(change.key, change.before, change.tokens)
                else:
                    self._there.pop(change.key, None)
            elif change.is_stored:
                self._snapshots.add(change.key)
            else:
                self._snapshots.discard(change.key)
            events += self._settle(change.key)
        return events

    def blocks(self) -> list[Stored]:
        """Return all blocks that count, parents before children."""
        found: dict[bytes, Stored] = {}
        for block in self._blocks.values():
            ahead = []
            at: Stored | None = block
            while at is not None and at.key not in found:
                ahead.append(at)
                at = self._blocks.get(at.before)
            found.update((one.key, one) for one in reversed(ahead))
        return list(found.values())

    def _settle(self, key: bytes) -> list[Event]:
        """Update whether this block and its predecessors count, and return the events."""
        stored, removed = list[Event](), list[Event]()
        while True:
            block = self._there.get(key)
            counts = block is not None and (
                not self._needs_snapshots or key in self._snapshots or self._followed.get(key, 0) > 0
            )
            if counts == (key in self._blocks):
                return stored[::-1] or removed
            if counts:
                assert block is not None
                self._blocks[key] = block
                stored.append(block)
            else:
                block = self._blocks.pop(key)
                removed.append(Removed(key))
            if not self._needs_snapshots:
                return stored or removed
            self._followed[block.before] += 1 if counts else -1
            if not self._followed[block.before]:
                del self._followed[block.before]
            key = block.before
