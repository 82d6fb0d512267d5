"""KV blocks: who owns which, and which wait behind the fence. Pure.

    free ──take──> owned ──fence──> fenced ──release──> free

Block 0 is the null block: padding and masked rows write to it, nobody reads it, it is never handed out.
"""

from __future__ import annotations

from collections.abc import Sequence

NULL_BLOCK = 0


class BlockPoolError(RuntimeError):
    """A block changed hands in a way it must not: a mistake of ours, never a user's."""


class BlockPool:
    """Blocks 1 to num_blocks - 1.

    `promised` counts blocks that admitted rows may still take: a row is admitted only if the longest it can become
    fits beside the promises to the others, so that it never has to be stopped for want of a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise BlockPoolError(f"a pool of {num_blocks} blocks has none besides the null block")
        self.block_size = block_size
        self.total = num_blocks - 1
        self.promised = 0
        self._free = list(range(num_blocks - 1, 0, -1))  # popped from the end: low ids first
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
        """Given up by their rows, still named by a launch in flight: not free, but coming."""
        return len(self._fenced)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def may_promise(self, blocks: int) -> bool:
        """Is there room for a row that may grow to this many blocks?"""
        return self.promised + blocks <= self.free

    def promise(self, blocks: int) -> bool:
        """Set aside room for a row. False if it does not fit now."""
        if not self.may_promise(blocks):
            return False
        self.promised += blocks
        return True

    def take(self, count: int) -> list[int]:
        """`count` promised blocks become owned. Raises BlockPoolError if they were not promised."""
        if count > self.promised or count > len(self._free):
            raise BlockPoolError(f"{count} blocks taken, {self.promised} promised and {self.free} free")
        self.promised -= count
        taken = [self._free.pop() for _ in range(count)]
        self._owned.update(taken)
        return taken

    def withdraw(self, blocks: int) -> None:
        """A promise that will not be used."""
        if blocks > self.promised:
            raise BlockPoolError(f"{blocks} promises withdrawn, {self.promised} were given")
        self.promised -= blocks

    def fence(self, blocks: Sequence[int]) -> None:
        """Their row has ended; launches in flight may still name them."""
        for block in blocks:
            if block not in self._owned:
                raise BlockPoolError(f"block {block} is given up and was not owned")
            self._owned.remove(block)
            self._fenced.add(block)

    def release(self, blocks: Sequence[int]) -> None:
        """The last launch that names them has retired."""
        for block in blocks:
            if block not in self._fenced:
                raise BlockPoolError(f"block {block} is released and was not fenced")
            self._fenced.remove(block)
            self._free.append(block)

    def check(self) -> None:
        """Conservation: every block is in exactly one place. Raises BlockPoolError."""
        if len(set(self._free)) != len(self._free):
            raise BlockPoolError("a block is free twice")
        if self._owned & self._fenced or (self._owned | self._fenced) & set(self._free):
            raise BlockPoolError("a block is in two places")
        if self.free + self.owned + self.fenced != self.total:
            raise BlockPoolError(f"{self.free} free + {self.owned} owned + {self.fenced} fenced is not {self.total}")
        if not 0 <= self.promised <= self.free:
            raise BlockPoolError(f"{self.promised} blocks are promised, {self.free} are free")
