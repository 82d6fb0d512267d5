"""Numbered places on the device that a row may need one of: penalty slots, state slots.

free ──allocate──> owned ──fence──> fenced ──release──> free
"""

from __future__ import annotations

NO_SLOT = -1


class SlotPoolError(RuntimeError):
    """A slot changed hands in a way it must not: a mistake of ours, never a user's."""


class SlotPool:
    """Slots 0 to total - 1. `name` is theirs in errors."""

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
        """Given up by their rows, still named by a launch in flight."""
        return len(self._fenced)

    def allocate(self) -> int:
        """A free slot becomes owned. Raises SlotPoolError if there is none."""
        if not self._free:
            raise SlotPoolError(f"a {self._name} is asked for and none is free")
        slot = self._free.pop()
        self._owned.add(slot)
        return slot

    def fence(self, slot: int) -> None:
        """Its row has ended; launches in flight may still name it."""
        if slot not in self._owned:
            raise SlotPoolError(f"{self._name} {slot} is given up and was not owned")
        self._owned.remove(slot)
        self._fenced.add(slot)

    def release(self, slot: int) -> None:
        """The last launch that names it has retired."""
        if slot not in self._fenced:
            raise SlotPoolError(f"{self._name} {slot} is released and was not fenced")
        self._fenced.remove(slot)
        self._free.append(slot)

    def check(self) -> None:
        """Conservation: every slot is in exactly one place. Raises SlotPoolError."""
        places = [*self._free, *self._owned, *self._fenced]
        if sorted(places) != list(range(self.total)):
            raise SlotPoolError(f"the {self._name}s {sorted(places)} are not each of {self.total} once")
