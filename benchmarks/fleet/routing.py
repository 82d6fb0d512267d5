"""How a router chooses a replica: by turns, by reports of their queues, by what they have cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.fleet.replica import Replica
from benchmarks.fleet.traffic import Request


class RoundRobin:
    """One after the other. The base of the others: who is ready, and their last reports."""

    def __init__(self) -> None:
        self.ready: list[Replica] = []
        self._turn = 0

    def set_ready(self, replicas: Sequence[Replica]) -> None:
        """Replicas that may get requests, at least one."""
        self.ready = list(replicas)
        self.report()

    def report(self) -> None:
        """Replicas say how much they have to do."""

    def learn(self, number: int, tenant: int, stored: bool) -> None:
        """A KV event of replica `number` arrives."""

    def choose(self, request: Request) -> Replica:
        self._turn = (self._turn + 1) % len(self.ready)
        return self.ready[self._turn]


class LeastWaiting(RoundRobin):
    """The fewest waiting requests, those sent since the last report included, and of equals the fewest running."""

    def __init__(self) -> None:
        super().__init__()
        self._loads: list[float] = []  # waiting requests, and a share of 1 for rows in use

    def report(self) -> None:
        self._loads = [len(each.waiting) + each.running / (each.costs.max_rows + 1) for each in self.ready]

    def choose(self, request: Request) -> Replica:
        return self._send(self._least())

    def _least(self) -> int:
        return self._loads.index(min(self._loads))

    def _send(self, place: int) -> Replica:
        self._loads[place] += 1
        return self.ready[place]


class PrefixAware(LeastWaiting):
    """The least load among replicas that have the prefix, as KV events say, unless `spill` more requests wait there
    than where the fewest wait."""

    spill: Final = 2

    def __init__(self) -> None:
        super().__init__()
        self._replicas_of: dict[int, set[int]] = {}  # numbers of replicas by tenant
        self._places: dict[int, int] = {}  # by number of a replica, where it is in `ready`

    def set_ready(self, replicas: Sequence[Replica]) -> None:
        super().set_ready(replicas)
        self._places = {replica.number: place for place, replica in enumerate(self.ready)}

    def learn(self, number: int, tenant: int, stored: bool) -> None:
        holders = self._replicas_of.setdefault(tenant, set())
        (holders.add if stored else holders.discard)(number)

    def choose(self, request: Request) -> Replica:
        loads, places = self._loads, self._places
        least = self._least()
        holders = [places[number] for number in self._replicas_of.get(request.tenant, ()) if number in places]
        if holders:
            best = min(holders, key=lambda place: (loads[place], place))
            if loads[best] <= loads[least] + self.spill:
                return self._send(best)
        return self._send(least)


POLICIES: Final = {"round-robin": RoundRobin, "least-waiting": LeastWaiting, "prefix-aware": PrefixAware}
