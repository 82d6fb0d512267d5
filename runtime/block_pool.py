"""KV blocks: who holds which, which wait behind the fence, which are found again by their content. Pure.

    free ──take──> owned ──fence──> fenced ──release──> free, or cached if its content is findable
                     ^                 │
      cached ──share─┴──────share──────┘        cached ──take──> owned, its content forgotten

A block may have several holders, all but its first by `share`. It is owned while any of them holds it, fenced while
none does and a launch in flight still names it. Cached blocks are given out too, the least recently used first, once
nothing is free. Block 0 is the null block: padding and masked rows write to it, nobody reads it, it is never handed
out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

NULL_BLOCK = 0


class BlockPoolError(RuntimeError):
    """A block changed hands in a way it must not: a mistake of ours, never a user's."""


class Content(NamedTuple):
    """What a findable block holds. key: of its tokens and all before them. tokens: its own ids, int32 bytes."""

    key: bytes
    tokens: bytes


class BlockPool:
    """Blocks 1 to num_blocks - 1."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise BlockPoolError(f"a pool of {num_blocks} blocks has none besides the null block")
        self.block_size = block_size
        self.total = num_blocks - 1
        self._free = list(range(num_blocks - 1, 0, -1))  # popped from the end: low ids first
        self._cached: OrderedDict[int, None] = OrderedDict()  # held by nobody, findable; least recently used first
        self._holders: Counter[int] = Counter()  # requests that hold a block
        self._fences: Counter[int] = Counter()  # holders that gave it up while a launch in flight names it
        self._coming = 0  # blocks with fences and no holder
        self._contents: dict[int, Content] = {}
        self._by_key: dict[bytes, int] = {}

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
        """Blocks that `take` can give out."""
        return len(self._free) + len(self._cached)

    @property
    def owned(self) -> int:
        return len(self._holders)

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
        return -(-tokens // self.block_size)

    def unheld(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are available: sharing them leaves so many fewer to take."""
        return sum(block in self._cached for block in blocks)

    # ------------------------------------------------------------ hands

    def take(self, count: int) -> list[int]:
        """`count` blocks become owned. Raises BlockPoolError if so many are not available."""
        if count > self.available:
            raise BlockPoolError(f"{count} blocks taken, {self.available} are available")
        from_free = min(count, len(self._free))
        taken = self._free[len(self._free) - from_free :][::-1]
        del self._free[len(self._free) - from_free :]
        for _ in range(count - from_free):
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            taken.append(block)
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of these findable blocks. Raises BlockPoolError for one that is not."""
        for block in blocks:
            if block not in self._contents:
                raise BlockPoolError(f"block {block} is shared and its content is not findable")
            if not self._holders[block]:
                self._cached.pop(block, None)
                self._coming -= block in self._fences
            self._holders[block] += 1

    def fence(self, blocks: Sequence[int]) -> None:
        """A holder gives them up; launches in flight may still name them."""
        for block in blocks:
            if not self._holders.get(block):
                raise BlockPoolError(f"block {block} is given up and was not owned")
            self._fences[block] += 1
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._coming += 1

    def release(self, blocks: Sequence[int]) -> list[int]:
        """The last launch that named them for a holder who gave them up has retired.

        Returns those that are free now, in nobody's hands and not findable. The last of `blocks` is reused first.
        """
        freed = []
        for block in reversed(blocks):
            if not self._fences.get(block):
                raise BlockPoolError(f"block {block} is released and was not fenced")
            self._fences[block] -= 1
            if self._fences[block]:
                continue
            del self._fences[block]
            if block in self._holders:
                continue
            self._coming -= 1
            if block in self._contents:
                self._cached[block] = None
            else:
                self._free.append(block)
                freed.append(block)
        return freed

    # ------------------------------------------------------------ found again

    def publish(self, block: int, content: Content) -> bool:
        """A block that somebody holds, or is behind the fence, can be found from now on.

        False if another block already holds the same. Raises BlockPoolError for a block that is free.
        """
        if block not in self._holders and block not in self._fences:
            raise BlockPoolError(f"block {block} is published and nobody holds it")
        if content.key in self._by_key or block in self._contents:
            return False
        self._contents[block] = content
        self._by_key[content.key] = block
        return True

    def find(self, content: Content) -> int | None:
        """The block with this content, its token ids compared. Finding changes nothing."""
        block = self._by_key.get(content.key)
        if block is None or self._contents[block] != content:
            return None
        return block

    def holding(self, keys: Iterable[bytes]) -> list[int]:
        """The findable blocks with these keys."""
        return [self._by_key[key] for key in keys if key in self._by_key]

    def forget(self, blocks: Iterable[int]) -> None:
        """These blocks are not to be found any more; one that nobody holds is free."""
        for block in blocks:
            if block in self._contents:
                self._forget(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def _forget(self, block: int) -> None:
        del self._by_key[self._contents.pop(block).key]

    # ------------------------------------------------------------ proof

    def check(self) -> None:
        """Conservation: every block is in exactly one place. Raises BlockPoolError."""
        free, cached, owned = set(self._free), set(self._cached), set(self._holders)
        fenced = set(self._fences) - owned
        if len(free) != len(self._free):
            raise BlockPoolError("a block is free twice")
        if len(free | cached | owned | fenced) != len(free) + len(cached) + len(owned) + len(fenced):
            raise BlockPoolError("a block is in two places")
        if self._coming != len(fenced) or self.free + self.cached + self.owned + self.fenced != self.total:
            raise BlockPoolError(
                f"{self.free} free + {self.cached} cached + {self.owned} owned + {self.fenced} fenced is not "
                f"{self.total}"
            )
        if min((*self._holders.values(), *self._fences.values()), default=1) < 1:
            raise BlockPoolError("a block is counted as held or fenced by nobody")
        if not cached <= set(self._contents) or free & set(self._contents):
            raise BlockPoolError("a cached block is not findable, or a free one is")
        if {content.key: block for block, content in self._contents.items()} != self._by_key:
            raise BlockPoolError("keys and contents do not agree")
