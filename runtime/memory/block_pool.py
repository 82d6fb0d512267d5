"""Pools of numbered memory on the device: KV blocks, and slots.

A block pool knows which requests own each KV block, which are fenced, and which can be found by their content.

    free ──allocate──> owned ──fence──> fenced ──release──> free, or cached if its content is findable
                         ^                 │
        cached ───share──┴──────share──────┘      cached ──allocate──> owned, its content forgotten

Several requests may own a block, all but the first by `share`. It is owned while any of them does, and fenced while
none does and a launch in flight names it. When no block is free, `allocate` takes cached ones, the least recently used
first. Block 0 is the null block: padding and masked rows write to it, nobody reads it, it is never allocated.

Some rows need a penalty slot or a state slot, which has one owner and no content.

    free ──allocate──> owned ──fence──> fenced ──release──> free
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from runahead.runtime.memory.block_changes import BlockChanges
from runahead.runtime.memory.block_column import BlockColumn, CachedBlocks, Watched, in_bulk, int32_array, raise_for
from runahead.runtime.memory.block_column import BlockPoolError as BlockPoolError
from runahead.runtime.rounding import ceil_div
from runahead.runtime.wire.prompts import Content

NULL_BLOCK = 0
NO_SLOT = -1


class BlockPool:
    """Blocks 1 to num_blocks - 1.

    changes: records which contents become findable and which are forgotten; None: nothing records them.
    """

    group = 0  # under which its changes are recorded

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise BlockPoolError(f"a pool of {num_blocks} blocks has none besides the null block")
        self.block_size = block_size
        self.total = num_blocks - 1
        self._free = list(range(num_blocks - 1, 0, -1))  # popped from the end: low ids first
        self._cached = CachedBlocks(num_blocks)  # findable, without an owner
        self._ref_counts = BlockColumn(num_blocks)  # owners of each block
        self._fences = BlockColumn(num_blocks)  # owners that gave it up while a launch in flight names it
        self._owned = 0  # blocks with owners
        self._coming = 0  # fenced blocks without an owner
        self._is_findable = BlockColumn(num_blocks, np.bool_)  # whether it has a content
        self._contents: dict[int, Content] = {}
        self._by_key: dict[bytes, int] = {}
        self._indexes = BlockColumn(num_blocks)  # see `Watched`
        self._watched = Watched(self._indexes)
        self.allocated_total = 0  # blocks that `allocate` has returned so far
        self.changes: BlockChanges | None = None

    # ------------------------------------------------------------ how many

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of findable blocks without an owner, which are allocated when no block is free."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Number of blocks that `allocate` can return."""
        return len(self._free) + len(self._cached)

    @property
    def owned(self) -> int:
        return self._owned

    @property
    def fenced(self) -> int:
        """Number of blocks without an owner that a launch in flight names: not free, but coming."""
        return self._coming

    @property
    def findable(self) -> int:
        """Number of blocks that `find` can find, in any state."""
        return len(self._contents)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks for this many tokens."""
        return ceil_div(tokens, self.block_size)

    # ------------------------------------------------------------ hands

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks, which become owned. Raises BlockPoolError if fewer are available."""
        if count > self.available:
            raise BlockPoolError(f"{count} blocks are asked for, {self.available} are available")
        from_free = min(count, len(self._free))
        blocks = []
        if from_free:
            blocks = self._free[: -from_free - 1 : -1]
            del self._free[-from_free:]
        if count > from_free:
            cached = self._cached.pop(count - from_free)
            for block in cached:
                self._forget(block, is_unowned=True)
            blocks += cached
        self._ref_counts.put(blocks, 1)
        self._owned += count
        self.allocated_total += count
        return blocks

    # The next three handle thousands of blocks of a long request in a few array operations. No block is named
    # twice in a call.

    def share(self, blocks: Sequence[int]) -> None:
        """Add an owner to each of these findable blocks. Raises BlockPoolError for a block that is not findable."""
        shared = in_bulk(blocks)
        raise_for(self._is_findable.without(shared), "is shared and its content is not findable")
        unowned = self._ref_counts.count_up(shared)
        cached = self._fences.without(unowned)
        self._owned += len(unowned)
        self._coming -= len(unowned) - len(cached)
        if len(cached):
            self._cached.remove(cached)
            self._watched.unowned -= self._watched.count(cached)

    def fence(self, blocks: Sequence[int]) -> None:
        """Remove an owner from each of these blocks; launches in flight may still name them. Raises BlockPoolError for
        a block that is not owned."""
        given_up = in_bulk(blocks)
        unowned = self._ref_counts.count_down(given_up, "is given up and was not owned")
        self._fences.count_up(given_up)
        self._owned -= len(unowned)
        self._coming += len(unowned)

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Release blocks that an owner gave up, when the last launch that named them has retired.

        Returns the blocks that are free now, the last of `blocks` first. Blocks that are cached now are allocated after
        all other cached ones, the last of them first. Raises BlockPoolError for a block that is not fenced.
        """
        unfenced = self._fences.count_down(in_bulk(blocks), "is released and was not fenced")
        loose = self._ref_counts.without(unfenced)
        self._coming -= len(loose)
        cached = self._is_findable.having(loose)
        if len(cached):
            self._cached.add(int32_array(cached))
            self._watched.unowned += self._watched.count(cached)
        freed = int32_array(self._is_findable.without(loose)).tolist() if len(cached) < len(loose) else []
        freed.reverse()
        self._free += freed
        return freed

    # ------------------------------------------------------------ found again

    def make_findable(self, block: int, content: Content) -> bool:
        """Let an owned or fenced block be found by its content.

        Returns False if another block has the same content. Raises BlockPoolError for a free block.
        """
        if not self._ref_counts.one[block] and not self._fences.one[block]:
            raise BlockPoolError(f"block {block} is made findable and has no owner")
        if content.key in self._by_key or block in self._contents:
            return False
        self._contents[block] = content
        self._is_findable.one[block] = True
        self._by_key[content.key] = block
        if self.changes is not None:
            self.changes.record(self.group, True, content)
        return True

    def find(self, content: Content) -> int | None:
        """Return the block with this content, or None. Token ids and preceding key are compared. Finding changes
        nothing."""
        block = self._by_key.get(content.key)
        if block is None or self._contents[block] != content:
            return None
        return block

    def holding(self, keys: Iterable[bytes]) -> list[int]:
        """Return the findable blocks with these keys."""
        return [self._by_key[key] for key in keys if key in self._by_key]

    def unsalted_contents(self, begin: int, end: int) -> list[Content]:
        """Return the contents with the empty salt of findable blocks `begin` to `end` - 1."""
        found = map(self._contents.get, range(begin, end))
        return [content for content in found if content is not None and content.unsalted]

    def unowned(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks are cached: sharing them makes so many fewer available."""
        return self._cached.count(in_bulk(blocks))

    def unfindable(self, blocks: Sequence[int]) -> list[int]:
        """Return the blocks among these that can't be found, in order."""
        return int32_array(self._is_findable.without(in_bulk(blocks))).tolist()

    def forget(self, blocks: Iterable[int]) -> None:
        """Let these blocks no longer be found. A cached one becomes free."""
        for block in blocks:
            is_unowned = block in self._cached
            if block in self._contents:
                self._forget(block, is_unowned)
            if is_unowned:
                self._cached.remove([block])
                self._free.append(block)

    def watch(self) -> Watched:
        """Return a new, empty list of watched blocks. The previous list is closed."""
        self._watched.close()
        self._watched = Watched(self._indexes)
        return self._watched

    def extend(self, content: Content) -> bool:
        """Append the block with this content to the watched ones. Returns False if it can't be found."""
        block = self.find(content)
        if block is not None:
            self._watched.add(block, block in self._cached)
        return block is not None

    def shorten(self) -> None:
        """Drop the watched blocks from the first that can't be found any more."""
        watched = self._watched
        while len(watched.blocks) > watched.findable:
            watched.drop(watched.blocks[-1] in self._cached)

    def _forget(self, block: int, is_unowned: bool) -> None:
        content = self._contents.pop(block)
        del self._by_key[content.key]
        if self.changes is not None:
            self.changes.record(self.group, False, content)
        self._is_findable.one[block] = False
        self._watched.forget(block, is_unowned)

    # ------------------------------------------------------------ proof

    def check(self) -> None:
        """Raise BlockPoolError unless every block has exactly one state and all counts agree."""
        owned, given_up, findable = (
            set(np.flatnonzero(column.many > 0).tolist())
            for column in (self._ref_counts, self._fences, self._is_findable)
        )
        free, cached, fenced = set(self._free), set(self._cached), given_up - owned
        if len(free) != len(self._free):
            raise BlockPoolError("a block is free twice")
        if not self._cached.is_consistent():
            raise BlockPoolError("the groups of cached blocks are miscounted")
        if len(free | cached | owned | fenced) != len(free) + len(cached) + len(owned) + len(fenced):
            raise BlockPoolError("a block is in two places")
        counted = (self.owned, self.fenced) == (len(owned), len(fenced))
        if not counted or self.free + self.cached + self.owned + self.fenced != self.total:
            raise BlockPoolError(
                f"{self.free} free + {self.cached} cached + {self.owned} owned + {self.fenced} fenced is not "
                f"{self.total}"
            )
        watched = self._watched
        if watched.unowned != sum(block in cached for block in watched.blocks):
            raise BlockPoolError("the watched blocks that are available are miscounted")
        if not set(watched.blocks[: watched.findable]) <= findable:
            raise BlockPoolError("a watched block is said to be findable and is not")
        if min(self._ref_counts.many.min(), self._fences.many.min()) < 0:
            raise BlockPoolError("a block has a negative count of owners or fences")
        if not cached <= findable or free & findable:
            raise BlockPoolError("a cached block is not findable, or a free one is")
        if findable != self._contents.keys():
            raise BlockPoolError("what is findable and what has a content do not agree")
        if {content.key: block for block, content in self._contents.items()} != self._by_key:
            raise BlockPoolError("keys and contents do not agree")


class SlotPoolError(RuntimeError):
    """A slot changed hands in an invalid way, which is a bug, never a user's mistake."""


class SlotPool:
    """Slots 0 to total - 1. name: what error messages call a slot."""

    def __init__(self, total: int, name: str) -> None:
        self.total = total
        self._name = name
        self._free = list(range(total - 1, -1, -1))  # popped from the end: low slots first
        self._owned: set[int] = set()
        self._fenced: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def owned(self) -> int:
        return len(self._owned)

    @property
    def fenced(self) -> int:
        """Number of slots that rows gave up and a launch in flight names."""
        return len(self._fenced)

    def allocate(self) -> int:
        """Return a free slot, which becomes owned. Raises SlotPoolError if there is none."""
        if not self._free:
            raise SlotPoolError(f"a {self._name} is asked for and none is free")
        slot = self._free.pop()
        self._owned.add(slot)
        return slot

    def fence(self, slot: int) -> None:
        """Fence the slot of an ended row, which launches in flight may still name. Raises SlotPoolError for a slot that
        is not owned."""
        if slot not in self._owned:
            raise SlotPoolError(f"{self._name} {slot} is given up and was not owned")
        self._owned.remove(slot)
        self._fenced.add(slot)

    def release(self, slot: int) -> None:
        """Free a slot when the last launch that names it has retired. Raises SlotPoolError for a slot that is not
        fenced."""
        if slot not in self._fenced:
            raise SlotPoolError(f"{self._name} {slot} is released and was not fenced")
        self._fenced.remove(slot)
        self._free.append(slot)

    def check(self) -> None:
        """Raise SlotPoolError unless every slot has exactly one state."""
        slots = [*self._free, *self._owned, *self._fenced]
        if sorted(slots) != list(range(self.total)):
            raise SlotPoolError(f"the {self._name}s {sorted(slots)} are not each of {self.total} once")
