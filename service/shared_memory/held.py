"""What calls hold of the service's room, in all and a caller, in memory that front ends share.

Each front end writes what its own calls hold; what all hold is the sum, which everybody can read without asking
anybody. A front end that dies has nothing more: the supervisor clears what it wrote.
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
    """What there is only so much of. The value is the column in the table."""

    STREAMS = 0  # completions that are open
    QUEUED_TOKENS = 1  # of prompts, from admission until the request has a row
    TOKENIZING_BYTES = 2  # of texts that wait to be tokenized, or are; ids that become text count 4 each
    UPLOADS = 3  # calls whose request is not there whole
    CONTROL_UPLOADS = 4  # the same of methods that bring no work, such as Stats: work never keeps them out


Amounts = Mapping[Resource, int]

ROWS: Final = 1024  # of callers who hold something in one front end
_WORD: Final = np.dtype(np.int64)
# Rows that are nobody's own, by the number that stands in place of a caller's.
_ALL, _OTHERS = 0, 1  # everybody's sum; callers for whom no row was left: together they are one caller


class HeldTable:
    """int64 [lines, rows] of whose a row is, int64 [lines, rows, resources] of what they hold, and int64 [lines,
    resources] of what was given back so far.

    memory: as many bytes as `size` says, all 0 at first.
    """

    def __init__(self, lines: int, memory: memoryview) -> None:
        words = np.frombuffer(memory, _WORD)
        rows, kinds = lines * (ROWS + 2), len(Resource)
        self._whose = words[:rows].reshape(lines, -1)
        self._held = words[rows : rows * (1 + kinds)].reshape(lines, -1, kinds)
        self._left = words[rows * (1 + kinds) :].reshape(lines, kinds)

    @staticmethod
    def size(lines: int) -> int:
        """Bytes."""
        return lines * ((ROWS + 2) * (1 + len(Resource)) + len(Resource)) * _WORD.itemsize

    def in_all(self) -> NDArray[np.int64]:
        """int64 [resources], of everybody."""
        return np.asarray(self._held[:, _ALL].sum(0))

    def left(self) -> NDArray[np.int64]:
        """int64 [resources]: what was given back since the service began."""
        return np.asarray(self._left.sum(0))

    def of(self, number: int) -> NDArray[np.int64]:
        """int64 [resources], of one caller by the number that `HeldLine.number_of` gives."""
        if number == _OTHERS:
            return np.asarray(self._held[:, _OTHERS].sum(0))
        return np.asarray(self._held[np.nonzero(self._whose == number)].sum(0))

    def clear(self, line: int) -> None:
        """Its front end holds nothing."""
        self._whose[line] = 0
        self._held[line] = 0

    def line(self, index: int) -> HeldLine:
        """For the one front end that writes it. What stands there is of one that has died."""
        self.clear(index)
        return HeldLine(self._whose[index], self._held[index], self._left[index])


@lru_cache(maxsize=4096)
def _number_of(caller: str) -> int:
    """The same in every process, and another than those of `_ALL` and `_OTHERS`."""
    return int.from_bytes(blake2b(caller.encode(), digest_size=7).digest()) + 2


class HeldLine:
    """What the calls of one front end hold: its lines of the table, which it alone writes."""

    def __init__(self, whose: NDArray[np.int64], held: NDArray[np.int64], left: NDArray[np.int64]) -> None:
        self._whose = whose
        self._held = held
        self._left = left
        self._rows: dict[int, int] = {}  # by the caller's number
        self._free = list(range(len(whose) - 1, _OTHERS, -1))

    def number_of(self, caller: str) -> int:
        """What stands for a caller in every front end. That of all who have no row, where none is left here."""
        number = _number_of(caller)
        return number if self._free or number in self._rows else _OTHERS

    def amount(self, resource: Resource) -> int:
        """Of all calls of this front end."""
        return int(self._held[_ALL, resource])

    @contextmanager
    def holding(self, number: int, amounts: Amounts) -> Iterator[Holding]:
        """For as long as the body runs, or until it is given back."""
        holding = Holding(self, number, amounts)
        try:
            yield holding
        finally:
            holding.close()

    def add(self, number: int, amounts: Amounts) -> None:
        """More, or less where an amount is below 0."""
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
    """What one call holds. number: the caller's."""

    def __init__(self, line: HeldLine, number: int, amounts: Amounts) -> None:
        self._line = line
        self._number = number
        self._amounts = {resource: amount for resource, amount in amounts.items() if amount}
        if self._amounts:
            line.add(number, self._amounts)

    def amount(self, resource: Resource) -> int:
        """What it holds of a resource."""
        return self._amounts.get(resource, 0)

    def add(self, amounts: Amounts) -> None:
        """It holds as much more."""
        for resource, amount in amounts.items():
            self._amounts[resource] = self.amount(resource) + amount
        self._line.add(self._number, amounts)

    def keep(self, resource: Resource, amount: int = 0) -> None:
        """It holds no more than so much of a resource from now on."""
        less = self.amount(resource) - amount
        if less > 0:
            self._amounts[resource] = amount
            self._line.add(self._number, {resource: -less})

    def give_back(self, resource: Resource, amount: int) -> None:
        """It holds so much less of a resource, as far as it holds that."""
        self.keep(resource, max(0, self.amount(resource) - amount))

    def close(self) -> None:
        """It holds nothing. Idempotent."""
        if held := {resource: -amount for resource, amount in self._amounts.items() if amount}:
            self._line.add(self._number, held)
        self._amounts = {}
