"""Numbered memory on the device that some rows need: penalty slots, state slots.

free ──allocate──> owned ──fence──> fenced ──release──> free
"""

from __future__ import annotations

NO_SLOT = -1


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
