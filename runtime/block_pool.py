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
    """What a findable block holds.

    key: of its tokens and all before them. tokens: its own ids, int32 bytes. before: the key of what comes before it.
    """

    key: bytes
    tokens: bytes
    before: bytes = b""


class Watched:
    """Findable blocks, one after the other, of which somebody wants to know at any time how many are there.

    The pool keeps its figures right with every block that changes hands, so that nobody looks at them again.

    unheld: of its blocks, those that are available: sharing them leaves so many fewer to take. findable: of its blocks,
    the first ones, up to the first that can't be found any more. places: of each block, among them.
    """

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.unheld = 0
        self.findable = 0
        self.places: dict[int, int] = {}

    def add(self, block: int, is_unheld: bool) -> None:
        """The next of its blocks. All others are findable."""
        self.places[block] = len(self.blocks)
        self.blocks.append(block)
        self.unheld += is_unheld
        self.findable += 1

    def drop(self, is_unheld: bool) -> None:
        """The last of its blocks is left out."""
        del self.places[self.blocks.pop()]
        self.unheld -= is_unheld

    def count(self, blocks: Iterable[int]) -> int:
        """How many of these are among its blocks."""
        return sum(map(self.places.__contains__, blocks))

    def forget(self, block: int) -> None:
        """It can't be found any more."""
        self.findable = min(self.findable, self.places.get(block, self.findable))


def _without_one(blocks: Sequence[int], counts: list[int]) -> dict[int, int]:
    """Of blocks that are counted, those that are still counted when each count is one less."""
    if counts.count(1) == len(counts):
        return {}
    return {block: count - 1 for block, count in zip(blocks, counts, strict=True) if count > 1}


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
        self._watched = Watched()
        self.taken_total = 0  # blocks that `take` has given out so far

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
            self._watched.unheld -= block in self._watched.places
            self._forget(block)
            taken.append(block)
        for block in taken:
            self._holders[block] = 1
        self.taken_total += count
        return taken

    # The next three go over thousands of blocks where a request is long, so that most of their loops are the
    # interpreter's own, and what only blocks with several holders need is left out where there are none. No block is
    # named twice in a call.

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of these findable blocks. Raises BlockPoolError for one that is not."""
        contents, holders, cached, watched = self._contents, self._holders, self._cached, self._watched
        if not all(map(contents.__contains__, blocks)):
            unknown = next(block for block in blocks if block not in contents)
            raise BlockPoolError(f"block {unknown} is shared and its content is not findable")
        unheld = blocks if holders.keys().isdisjoint(blocks) else [block for block in blocks if block not in holders]
        holders.update(blocks)
        fenced = []
        for block in unheld:
            if block in cached:
                del cached[block]
            else:
                fenced.append(block)
        self._coming -= len(fenced)
        watched.unheld -= watched.count(unheld) - watched.count(fenced)

    def fence(self, blocks: Sequence[int]) -> None:
        """A holder gives them up; launches in flight may still name them."""
        try:
            counts = [*map(self._holders.pop, blocks)]
        except KeyError as error:
            raise BlockPoolError(f"block {error.args[0]} is given up and was not owned") from None
        still_held = _without_one(blocks, counts)
        self._holders.update(still_held)
        self._fences.update(blocks)
        self._coming += len(blocks) - len(still_held)

    def release(self, blocks: Sequence[int]) -> list[int]:
        """The last launch that named them for a holder who gave them up has retired.

        Returns those that are free now, in nobody's hands and not findable. The last of `blocks` is reused first.
        """
        fences, holders, contents, cached, watched = (
            self._fences, self._holders, self._contents, self._cached, self._watched,
        )  # fmt: skip
        try:
            counts = [*map(fences.pop, blocks)]
        except KeyError as error:
            raise BlockPoolError(f"block {error.args[0]} is released and was not fenced") from None
        still_fenced = _without_one(blocks, counts)
        fences.update(still_fenced)
        loose = blocks[::-1]
        if still_fenced or not holders.keys().isdisjoint(blocks):
            loose = [block for block in loose if block not in still_fenced and block not in holders]
        freed = []
        for block in loose:
            if block in contents:
                cached[block] = None
            else:
                freed.append(block)
        self._free += freed
        self._coming -= len(loose)
        watched.unheld += watched.count(loose) - watched.count(freed)
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
        """The block with this content, its token ids and what comes before it compared. Finding changes nothing."""
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
                self._uncache(block)
                self._free.append(block)

    def watch(self) -> Watched:
        """An empty row of findable blocks, to be extended; the one before is watched no more."""
        self._watched = Watched()
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

    def _uncache(self, block: int) -> None:
        del self._cached[block]
        self._watched.unheld -= block in self._watched.places

    def _forget(self, block: int) -> None:
        del self._by_key[self._contents.pop(block).key]
        self._watched.forget(block)

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
        watched = self._watched
        if watched.unheld != sum(block in cached for block in watched.blocks):
            raise BlockPoolError("the watched blocks that are available are miscounted")
        if not set(watched.blocks[: watched.findable]) <= set(self._contents):
            raise BlockPoolError("a watched block is said to be findable and is not")
        if min((*self._holders.values(), *self._fences.values()), default=1) < 1:
            raise BlockPoolError("a block is counted as held or fenced by nobody")
        if not cached <= set(self._contents) or free & set(self._contents):
            raise BlockPoolError("a cached block is not findable, or a free one is")
        if {content.key: block for block, content in self._contents.items()} != self._by_key:
            raise BlockPoolError("keys and contents do not agree")
