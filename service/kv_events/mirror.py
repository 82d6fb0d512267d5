"""What the prefix cache holds, as told by the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from runahead.runtime.wire.kv_events import KvChange
from runahead.service.kv_events.events import Event, Removed, Stored


class KvMirror:
    """The blocks of the empty salt that a prompt can begin with.

    needs_snapshots: the model keeps recurrent states. A prompt begins with cached blocks only up to one behind which
    there is a snapshot of the state, so a block counts where it has one itself, or a block behind it counts.
    """

    def __init__(self, needs_snapshots: bool) -> None:
        self._needs_snapshots = needs_snapshots
        self._blocks: dict[bytes, Stored] = {}  # that count, by key, in the order in which they began to
        self._there: dict[bytes, Stored] = {}  # that the engine has
        self._snapshots: set[bytes] = set()  # that the engine has, by the key of the block before them
        self._followed: defaultdict[bytes, int] = defaultdict(int)  # blocks right behind a block that count

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Nothing is known to be there."""
        for known in (self._blocks, self._there, self._snapshots, self._followed):
            known.clear()

    def apply(self, changes: Iterable[KvChange]) -> list[Event]:
        """What the changes are to a router. A change that is told of twice is one. Parents come before children."""
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
        """All blocks that count, parents before children."""
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
        """Whether this block counts may have changed, and with it whether those before it do."""
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
