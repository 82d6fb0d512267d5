"""What calls hold of limited resources, in all and by caller, in shared memory.

Each front end writes what its calls hold; totals are sums that every front end can compute alone. The supervisor clears
a dead front end's part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray


class Resource(IntEnum):
    """Limited resources. The value is the column in the table."""

    STREAMS = 0  # open completions
    QUEUED_TOKENS = 1  # prompt tokens from admission until the request has a row
    TOKENIZING_BYTES = 2  # texts that wait for or are in tokenization; ids that become text count 4 each
    UPLOADS = 3  # calls whose request is incomplete
    CONTROL_UPLOADS = 4  # the same for methods without work, such as Stats, which work must not keep out


Amounts = Mapping[Resource, int]

ROWS: Final = 1024  # of callers that hold something in one front end
_WORD: Final = np.dtype(np.int64)
# Rows without a caller, by the number in place of a caller's.
_ALL, _OTHERS = 0, 1  # the sum over all; callers without a row, treated as one caller


class HeldTable:
    """Owners of rows, int64 [lines, rows], held amounts, int64 [lines, rows, resources], and amounts given back so far,
    int64 [lines, resources].

    memory: `size` bytes, all 0 at first.
    """

    def __init__(self, lines: int, memory: memoryview) -> None:
        words = np.frombuffer(memory, _WORD)
        rows, kinds = lines * (ROWS + 2), len(Resource)
        self._whose = words[:rows].reshape(lines, -1)
        self._held = words[rows : rows * (1 + kinds)].reshape(lines, -1, kinds)
        self._left = words[rows * (1 + kinds) :].reshape(lines, kinds)

    @staticmethod
    def size(lines: int) -> int:
        """Return the size in bytes."""
        return lines * ((ROWS + 2) * (1 + len(Resource)) + len(Resource)) * _WORD.itemsize

    def in_all(self) -> NDArray[np.int64]:
        """Return everybody's amounts, int64 [resources]."""
        return np.asarray(self._held[:, _ALL].sum(0))

    def left(self) -> NDArray[np.int64]:
        """Return the amounts given back since the service began, int64 [resources]."""
        return np.asarray(self._left.sum(0))

    def of(self, number: int) -> NDArray[np.int64]:
        """Return one caller's amounts, int64 [resources]. number: from `HeldLine.number_of`."""
        if number == _OTHERS:
            return np.asarray(self._held[:, _OTHERS].sum(0))
        return np.asarray(self._held[np.nonzero(self._whose == number)].sum(0))

    def clear(self, line: int) -> None:
        """Clear a front end's line."""
        self._whose[line] = 0
        self._held[line] = 0

    def line(self, index: int) -> HeldLine:
        """Return the line for its only writer. Clears a dead predecessor's amounts."""
        self.clear(index)
        return HeldLine(self._whose[index], self._held[index], self._left[index])


@lru_cache(maxsize=4096)
def _number_of(caller: str) -> int:
    """Hash a caller to a number, equal in every process and different from `_ALL` and `_OTHERS`."""
    return int.from_bytes(blake2b(caller.encode(), digest_size=7).digest()) + 2


class HeldLine:
    """The amounts held by one front end's calls, written by it alone."""

    def __init__(self, whose: NDArray[np.int64], held: NDArray[np.int64], left: NDArray[np.int64]) -> None:
        self._whose = whose
        self._held = held
        self._left = left
        self._rows: dict[int, int] = {}  # by caller number
        self._free = list(range(len(whose) - 1, _OTHERS, -1))

    def number_of(self, caller: str) -> int:
        """Return a caller's number, equal in every front end, or `_OTHERS` if no row is left here."""
        number = _number_of(caller)
        return number if self._free or number in self._rows else _OTHERS

    def amount(self, resource: Resource) -> int:
        """Return this front end's amount."""
        return int(self._held[_ALL, resource])

    @contextmanager
    def holding(self, number: int, amounts: Amounts) -> Iterator[Holding]:
        """Hold amounts while the body runs, or until they are given back."""
        holding = Holding(self, number, amounts)
        try:
            yield holding
        finally:
            holding.close()

    def add(self, number: int, amounts: Amounts) -> None:
        """Add amounts, which may be negative."""
        row = self._row_of(number)
        for resource, amount in amounts.items():
            self._held[row, resource] += amount
            self._held[_ALL, resource] += amount
            self._left[resource] += max(0, -amount)
        if row != _OTHERS and not self._held[row].any():
            self._whose[row] = 0
            del self._rows[number]
            self._free.append(row)

    def _row_of(self, number: int) -> int:
        if number == _OTHERS:
            return _OTHERS
        row = self._rows.get(number)
        if row is None:
            row = self._rows[number] = self._free.pop()
            self._whose[row] = number
        return row


class Holding:
    """The amounts held by one call. number: the caller's."""

    def __init__(self, line: HeldLine, number: int, amounts: Amounts) -> None:
        self._line = line
        self._number = number
        self._amounts = {resource: amount for resource, amount in amounts.items() if amount}
        if self._amounts:
            line.add(number, self._amounts)

    def amount(self, resource: Resource) -> int:
        """Return the held amount of a resource."""
        return self._amounts.get(resource, 0)

    def add(self, amounts: Amounts) -> None:
        """Add amounts."""
        for resource, amount in amounts.items():
            self._amounts[resource] = self.amount(resource) + amount
        self._line.add(self._number, amounts)

    def keep(self, resource: Resource, amount: int = 0) -> None:
        """Reduce a resource to at most this amount."""
        less = self.amount(resource) - amount
        if less > 0:
            self._amounts[resource] = amount
            self._line.add(self._number, {resource: -less})

    def give_back(self, resource: Resource, amount: int) -> None:
        """Give back this much of a resource, at most what is held."""
        self.keep(resource, max(0, self.amount(resource) - amount))

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if held := {resource: -amount for resource, amount in self._amounts.items() if amount}:
            self._line.add(self._number, held)
        self._amounts = {}
