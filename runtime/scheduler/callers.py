"""How callers share rows: who holds how many, and how many tokens each of them was served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from runahead.runtime.scheduler.rationing import order_of_service
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import RowPhase, Rows


class Callers:
    """Callers with a request that waits or has a row.

    A caller that comes begins with as many tokens as the one that was served least, so that nobody saves up turns.
    by_slot: whose row each slot is.
    """

    def __init__(self, rows: Rows, by_slot: list[Request | None]) -> None:
        self._rows = rows
        self._by_slot = by_slot
        self._requests = Counter[str]()  # of each caller
        self._served: dict[str, int] = {}  # tokens of its rows that have ended
        self._counted: Counter[str] = Counter()  # see `rows`
        self._counted_at = -1

    @property
    def are_several(self) -> bool:
        return len(self._requests) > 1

    def enter(self, caller: str) -> None:
        """A request of the caller is queued."""
        if caller not in self._requests:
            self._served[caller] = min(self.served(self._requests).values(), default=0)
        self._requests[caller] += 1

    def leave(self, caller: str) -> None:
        """A request of the caller has ended."""
        self._requests[caller] -= 1
        if not self._requests[caller]:
            del self._requests[caller], self._served[caller]

    def row_ended(self, request: Request) -> None:
        """The request's row has ended, or its last token before an eviction is committed."""
        self._served[request.caller] += self._tokens_of(request)

    def served(self, callers: Iterable[str]) -> dict[str, int]:
        """Tokens that rows of these callers have computed, prompts too, and those of the rows that they have now."""
        found = {caller: self._served[caller] for caller in callers}
        for request in self._by_slot:
            if request is not None and request.caller in found:
                found[request.caller] += self._tokens_of(request)
        return found

    def rows(self) -> Counter[str]:
        """Rows of each caller, but for those that were told to leave."""
        if self._counted_at != self._rows.changes:
            self._counted = Counter(request.caller for request in self.running())
            self._counted_at = self._rows.changes
        return self._counted

    def running(self) -> list[Request]:
        """Requests whose rows were not told to leave."""
        phase = self._rows.phase
        return [one for one in self._by_slot if one is not None and phase[one.row_slot] != RowPhase.LEAVING]

    def in_order(self, slots: Sequence[int]) -> list[int]:
        """These slots of rows that run, in the order in which they are served."""
        found = [request for slot in slots if (request := self._by_slot[slot]) is not None]
        if self.are_several:
            keys = order_of_service(self.running())
            found.sort(key=lambda request: keys[request])
        else:
            found.sort(key=lambda request: request.rank)
        return [request.row_slot for request in found]

    def _tokens_of(self, request: Request) -> int:
        return int(self._rows.committed_len[request.row_slot]) - request.begun_at
