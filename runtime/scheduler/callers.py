"""Callers: the rows of each, and the tokens that each was served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from runahead.runtime.scheduler.rationing import order_of_service
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import RowPhase, Rows


class Callers:
    """Callers with a request that waits or has a row.

    Tokens count while several callers wait. A caller with a first waiting request begins with the tokens of the waiting
    caller that was served least. When nothing waits, all callers begin anew, so nobody saves up service while it has
    all the rows that it asks for. by_slot: the request of each slot.
    """

    def __init__(self, rows: Rows, by_slot: list[Request | None]) -> None:
        self._rows = rows
        self._by_slot = by_slot
        self._requests = Counter[str]()  # requests of each caller
        self._served: dict[str, int] = {}  # by caller; its rows' tokens come on top
        self._counted: Counter[str] = Counter()  # see `rows`
        self._counted_at = -1

    @property
    def are_several(self) -> bool:
        return len(self._requests) > 1

    def enter(self, caller: str) -> None:
        """Count a queued request of the caller."""
        if self._requests.keys() - {caller}:
            rows = Counter(one.caller for one in self._by_slot if one is not None)
            waiting = [one for one, requests in self._requests.items() if requests > rows[one]]
            if not waiting:
                served = self.served(self._requests)
                self._served = {one: self._served[one] - served[one] for one in self._requests}
            elif caller not in waiting:
                own = self.served([caller])[caller] if caller in self._requests else 0
                lifted = max(own, min(self.served(waiting).values()))
                self._served[caller] = self._served.get(caller, 0) + lifted - own
        self._served.setdefault(caller, 0)
        self._requests[caller] += 1

    def leave(self, caller: str) -> None:
        """Count an ended request of the caller."""
        self._requests[caller] -= 1
        if not self._requests[caller]:
            del self._requests[caller], self._served[caller]

    def row_ended(self, request: Request) -> None:
        """Add the tokens of a row that has ended, or was evicted and whose last token is committed."""
        self._served[request.caller] += self._tokens_of(request)

    def served(self, callers: Iterable[str]) -> dict[str, int]:
        """Return the tokens, prompts included, that rows of these callers have computed for the first time since
        counting began."""
        found = {caller: self._served[caller] for caller in callers}
        for request in self._by_slot:
            if request is not None and request.caller in found:
                found[request.caller] += self._tokens_of(request)
        return found

    def rows(self) -> Counter[str]:
        """Return the number of rows of each caller, without leaving rows."""
        if self._counted_at != self._rows.changes:
            self._counted = Counter(request.caller for request in self.running())
            self._counted_at = self._rows.changes
        return self._counted

    def running(self) -> list[Request]:
        """Return the requests whose rows are not leaving."""
        phase = self._rows.phase
        return [one for one in self._by_slot if one is not None and phase[one.row_slot] != RowPhase.LEAVING]

    def in_order(self, slots: Sequence[int]) -> list[int]:
        """Return these slots of running rows in the order of service."""
        found = [request for slot in slots if (request := self._by_slot[slot]) is not None]
        if self.are_several:
            keys = order_of_service(self.running())
            found.sort(key=lambda request: keys[request])
        else:
            found.sort(key=lambda request: request.queue_order)
        return [request.row_slot for request in found]

    def _tokens_of(self, request: Request) -> int:
        rows, slot = self._rows, request.row_slot
        computed = int(rows.least_len[slot])
        if computed >= rows.known_len[slot]:  # past its prompt
            computed = int(rows.committed_len[slot])
        return max(0, computed - request.begun_at)
