"""KV blocks: who holds which, which wait behind the fence, which are found again by their content.

    free ──allocate──> owned ──fence──> fenced ──release──> free, or cached if its content is findable
                         ^                 │
        cached ───share──┴──────share──────┘      cached ──allocate──> owned, its content forgotten

A block may have several holders, all but its first by `share`. It is owned while any of them holds it, fenced while
none does and a launch in flight still names it. Cached blocks are given out too, the least recently used first, once
nothing is free. Block 0 is the null block: padding and masked rows write to it, nobody reads it, it is never handed
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from runahead.runtime.memory.block_changes import BlockChanges
from runahead.runtime.memory.block_column import BlockColumn, in_bulk, int32_array, raise_for
from runahead.runtime.memory.block_column import BlockPoolError as BlockPoolError
from runahead.runtime.memory.cached_blocks import CachedBlocks
from runahead.runtime.memory.watched_blocks import Watched
from runahead.runtime.rounding import ceil_div
from runahead.runtime.wire.block_keys import Content

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 to num_blocks - 1.

    changes: records which contents become findable and which are forgotten; None: nothing does.
    """

    group = 0  # under which its changes are recorded

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise BlockPoolError(f"a pool of {num_blocks} blocks has none besides the null block")
        self.block_size = block_size
        self.total = num_blocks - 1
        self._free = list(range(num_blocks - 1, 0, -1))  # popped from the end: low ids first
        self._cached = CachedBlocks(num_blocks)  # held by nobody, findable
        self._holders = BlockColumn(num_blocks)  # requests that hold a block
        self._fences = BlockColumn(num_blocks)  # holders that gave it up while a launch in flight names it
        self._owned = 0  # blocks with holders
        self._coming = 0  # blocks with fences and no holder
        self._is_findable = BlockColumn(num_blocks, np.bool_)  # it has a content
        self._contents: dict[int, Content] = {}
        self._by_key: dict[bytes, int] = {}
        self._places = BlockColumn(num_blocks)  # see `Watched`
        self._watched = Watched(self._places)
        self.allocated_total = 0  # blocks that `allocate` has given out so far
        self.changes: BlockChanges | None = None

    # ------------------------------------------------------------ how many

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Held by nobody, findable, and given out when nothing is free."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give out."""
        return len(self._free) + len(self._cached)

    @property
    def owned(self) -> int:
        return self._owned

    @property
    def fenced(self) -> int:
        """Given up by all who held them, still named by a launch in flight: not free, but coming."""
        return self._coming

    @property
    def findable(self) -> int:
        """Blocks that `find` can find, whoever holds them."""
        return len(self._contents)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return ceil_div(tokens, self.block_size)

    # ------------------------------------------------------------ hands

    def allocate(self, count: int) -> list[int]:
        """`count` blocks become owned. Raises BlockPoolError if so many are not available."""
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
                self._forget(block, is_unheld=True)
            blocks += cached
        self._holders.put(blocks, 1)
        self._owned += count
        self.allocated_total += count
        return blocks

    # The next three go over thousands of blocks where a request is long: a few passes over arrays. No block is named
    # twice in a call.

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of these findable blocks. Raises BlockPoolError for one that is not."""
        shared = in_bulk(blocks)
        raise_for(self._is_findable.without(shared), "is shared and its content is not findable")
        unheld = self._holders.count_up(shared)
        cached = self._fences.without(unheld)
        self._owned += len(unheld)
        self._coming -= len(unheld) - len(cached)
        if len(cached):
            self._cached.remove(cached)
            self._watched.unheld -= self._watched.count(cached)

    def fence(self, blocks: Sequence[int]) -> None:
        """A holder gives them up; launches in flight may still name them. Raises BlockPoolError for one not owned."""
        given_up = in_bulk(blocks)
        unheld = self._holders.count_down(given_up, "is given up and was not owned")
        self._fences.count_up(given_up)
        self._owned -= len(unheld)
        self._coming += len(unheld)

    def release(self, blocks: Sequence[int]) -> list[int]:
        """The last launch that named them for a holder who gave them up has retired.

        Returns those that are free now, in nobody's hands and not findable, the last of `blocks` first. Those that are
        cached now are given out after all others, the last of them first. Raises BlockPoolError for one not fenced.
        """
        unfenced = self._fences.count_down(in_bulk(blocks), "is released and was not fenced")
        loose = self._holders.without(unfenced)
        self._coming -= len(loose)
        cached = self._is_findable.having(loose)
        if len(cached):
            self._cached.add(int32_array(cached))
            self._watched.unheld += self._watched.count(cached)
        freed = int32_array(self._is_findable.without(loose)).tolist() if len(cached) < len(loose) else []
        freed.reverse()
        self._free += freed
        return freed

    # ------------------------------------------------------------ found again

    def make_findable(self, block: int, content: Content) -> bool:
        """A block that somebody holds, or is behind the fence, can be found from now on.

        False if another block already holds the same. Raises BlockPoolError for a block that is free.
        """
        if not self._holders.one[block] and not self._fences.one[block]:
            raise BlockPoolError(f"block {block} is made findable and nobody holds it")
        if content.key in self._by_key or block in self._contents:
            return False
        self._contents[block] = content
        self._is_findable.one[block] = True
        self._by_key[content.key] = block
        if self.changes is not None:
            self.changes.record(self.group, True, content)
        return True

    def find(self, content: Content) -> int | None:
        """The block with this content, its token ids and what comes before it compared. Finding changes nothing."""
        block = self._by_key.get(content.key)
        if block is None or self._contents[block] != content:
            return None
        return block

    def holding(self, keys: Iterable[bytes]) -> list[int]:
        """The findable blocks with these keys."""
        return [self._by_key[key] for key in keys if key in self._by_key]

    def unsalted_contents(self, begin: int, end: int) -> list[Content]:
        """What the findable blocks from `begin` to before `end` hold, where the salt is empty."""
        found = map(self._contents.get, range(begin, end))
        return [content for content in found if content is not None and content.unsalted]

    def unheld(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are available, and findable: sharing them leaves so many fewer to allocate."""
        return self._cached.count(in_bulk(blocks))

    def unfindable(self, blocks: Sequence[int]) -> list[int]:
        """Those of these blocks that can't be found, in order."""
        return int32_array(self._is_findable.without(in_bulk(blocks))).tolist()

    def forget(self, blocks: Iterable[int]) -> None:
        """These blocks are not to be found any more; one that nobody holds is free."""
        for block in blocks:
            is_unheld = block in self._cached
            if block in self._contents:
                self._forget(block, is_unheld)
            if is_unheld:
                self._cached.remove([block])
                self._free.append(block)

    def watch(self) -> Watched:
        """An empty list of watched blocks, to be extended. Those of the list before are watched no more."""
        self._watched.close()
        self._watched = Watched(self._places)
        return self._watched

    def extend(self, content: Content) -> bool:
        """The block with this content joins the watched ones, behind them. False: it can't be found."""
        block = self.find(content)
        if block is not None:
            self._watched.add(block, block in self._cached)
        return block is not None

    def shorten(self) -> None:
        """The watched blocks without those from the first on that can't be found any more."""
        watched = self._watched
        while len(watched.blocks) > watched.findable:
            watched.drop(watched.blocks[-1] in self._cached)

    def _forget(self, block: int, is_unheld: bool) -> None:
        content = self._contents.pop(block)
        del self._by_key[content.key]
        if self.changes is not None:
            self.changes.record(self.group, False, content)
        self._is_findable.one[block] = False
        self._watched.forget(block, is_unheld)

    # ------------------------------------------------------------ proof

    def check(self) -> None:
        """Conservation: every block is in exactly one place. Raises BlockPoolError."""
        owned, given_up, findable = (
            set(np.flatnonzero(column.many > 0).tolist()) for column in (self._holders, self._fences, self._is_findable)
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
        if watched.unheld != sum(block in cached for block in watched.blocks):
            raise BlockPoolError("the watched blocks that are available are miscounted")
        if not set(watched.blocks[: watched.findable]) <= findable:
            raise BlockPoolError("a watched block is said to be findable and is not")
        if min(self._holders.many.min(), self._fences.many.min()) < 0:
            raise BlockPoolError("a block is counted as held or fenced by nobody")
        if not cached <= findable or free & findable:
            raise BlockPoolError("a cached block is not findable, or a free one is")
        if findable != self._contents.keys():
            raise BlockPoolError("what is findable and what has a content do not agree")
        if {content.key: block for block, content in self._contents.items()} != self._by_key:
            raise BlockPoolError("keys and contents do not agree")
