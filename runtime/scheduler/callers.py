"""How callers share rows: who holds how many, and how many tokens each of them was served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from runahead.runtime.scheduler.rationing import order_of_service
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import RowPhase, Rows


class Callers:
    """Callers with a request that waits or has a row.

    Tokens count while callers wait beside each other. A caller of which nothing waited begins with the tokens of the
    waiting caller that was served least, and where nothing waits all callers begin anew: nobody saves up turns while
    it has all the rows that it asks for. by_slot: whose row each slot is.
    """

    def __init__(self, rows: Rows, by_slot: list[Request | None]) -> None:
        self._rows = rows
        self._by_slot = by_slot
        self._requests = Counter[str]()  # of each caller
        self._served: dict[str, int] = {}  # of each: with the tokens of its rows, those that it was served
        self._counted: Counter[str] = Counter()  # see `rows`
        self._counted_at = -1

    @property
    def are_several(self) -> bool:
        return len(self._requests) > 1

    def enter(self, caller: str) -> None:
        """A request of the caller is queued."""
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
        """A request of the caller has ended."""
        self._requests[caller] -= 1
        if not self._requests[caller]:
            del self._requests[caller], self._served[caller]

    def row_ended(self, request: Request) -> None:
        """The request's row has ended, or its last token before an eviction is committed."""
        self._served[request.caller] += self._tokens_of(request)

    def served(self, callers: Iterable[str]) -> dict[str, int]:
        """Tokens that rows of these callers have computed for the first time, prompts too, since they count."""
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
        rows, slot = self._rows, request.row_slot
        computed = int(rows.least_len[slot])
        if computed >= rows.known_len[slot]:  # past its prompt
            computed = int(rows.committed_len[slot])
        return max(0, computed - request.begun_at)
