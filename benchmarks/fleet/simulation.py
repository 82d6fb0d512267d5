"""Replicas behind a router, from the first arrival to the last token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Final, Literal

from benchmarks.fleet.costs import Costs
from benchmarks.fleet.figures import Figures
from benchmarks.fleet.replica import Replica
from benchmarks.fleet.routing import POLICIES
from benchmarks.fleet.traffic import Request, Traffic

KINDS: Final = ("lose", "drain", "add")

_Event = tuple[float, int, int, int, bool]  # when it is known, a number, its replica, tenant, and whether stored


@dataclass(frozen=True, slots=True)
class Change:
    """At `at_s`, `count` replicas are lost without notice, drained, or started, the oldest first."""

    at_s: float
    kind: Literal["lose", "drain", "add"]
    count: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas behind a router. report_s: interval of load reports. kv_delay_s: from a change of a cache until the
    router knows it. cold_start_s: from a replica's GPU allocation until it is ready."""

    replicas: int
    policy: str = "least-waiting"
    report_s: float = 0.1
    kv_delay_s: float = 0.1
    cold_start_s: float = 60.0
    changes: tuple[Change, ...] = ()
    first_limit_ms: float = 200.0
    token_limit_ms: float = 25.0


def simulate(fleet: Fleet, costs: Costs, traffic: Traffic) -> Figures:
    """Raises ValueError for prompts that are longer than what was measured, and if no replica is left."""
    if traffic.longest_prompt > costs.longest_prompt:
        longest = traffic.longest_prompt
        raise ValueError(f"prompts of {longest} tokens: the costs were measured up to {costs.longest_prompt}")
    run = _Run(fleet, costs)
    run.serve(traffic.requests())
    return run.figures


class _Run:
    """Times in ms. Replicas are advanced when a request comes to them, and all of them at each report."""

    def __init__(self, fleet: Fleet, costs: Costs) -> None:
        self.figures = Figures(fleet.first_limit_ms, fleet.token_limit_ms)
        self._fleet, self._costs = fleet, costs
        self._router = POLICIES[fleet.policy]()
        self._replicas = list[Replica]()  # ready, oldest first
        self._draining = list[Replica]()
        self._starting = list[tuple[float, Replica]]()
        self._started = 0
        self._changes = sorted(fleet.changes, key=lambda change: change.at_s, reverse=True)
        self._events = list[_Event]()  # a heap
        self._event_number = 0
        for _ in range(fleet.replicas):
            self._replicas.append(self._new(0.0, 0.0))
        self._router.set_ready(self._replicas)

    def serve(self, requests: Iterable[Request]) -> None:
        report = 0.0
        step = 1e3 * self._fleet.report_s
        for request in requests:
            while request.arrived >= report:
                self._report(report)
                report += step
            self.figures.requests += 1
            self._send(request, request.arrived)
        while self._changes:  # those after the last arrival
            self._report(1e3 * self._changes[-1].at_s)
        for replica in [*self._replicas, *self._draining]:
            replica.advance(inf)
        end = max([self.figures.end, report - step])
        for replica in self._replicas:
            self.figures.gpu_ms += end - replica.began
        for _, replica in self._starting:
            self.figures.gpu_ms += max(0.0, end - replica.began)
        for replica in self._draining:
            self.figures.gpu_ms += replica.end - replica.began

    def _new(self, began: float, ready: float) -> Replica:
        self._started += 1
        return Replica(self._started, self._costs, self.figures, began, ready)

    def _send(self, request: Request, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            self._router.learn(*heappop(self._events)[2:])
        replica = self._router.choose(request)
        replica.advance(now)
        replica.submit(request, now)

    def _report(self, now: float) -> None:
        for replica in [*self._replicas, *self._draining]:
            replica.advance(now)
            self._collect(replica)
        figures = self.figures
        figures.reports += len(self._replicas)
        for replica in self._replicas:
            figures.waiting += len(replica.waiting)
            figures.running += replica.running
            figures.kv += replica.prefixes.held / replica.prefixes.capacity
        self._change(now)
        self._router.report()

    def _collect(self, replica: Replica) -> None:
        """KV events are on their way to the router."""
        for at, tenant, stored in replica.prefixes.events:
            self._event_number += 1
            known = at + 1e3 * self._fleet.kv_delay_s
            heappush(self._events, (known, self._event_number, replica.number, tenant, stored))
        replica.prefixes.events.clear()

    def _change(self, now: float) -> None:
        """Replicas come and go."""
        before = list(self._replicas)
        for replica in [each for each in self._draining if not (each.running or each.waiting)]:
            self._draining.remove(replica)
            self.figures.gpu_ms += max(now, replica.end) - replica.began
        while self._starting and self._starting[0][0] <= now:
            self._replicas.append(self._starting.pop(0)[1])
        lost = list[Replica]()
        while self._changes and 1e3 * self._changes[-1].at_s <= now:
            change = self._changes.pop()
            if change.kind == "add":
                ready = now + 1e3 * self._fleet.cold_start_s
                self._starting += [(ready, self._new(now, ready)) for _ in range(change.count)]
                continue
            gone, self._replicas = self._replicas[: change.count], self._replicas[change.count :]
            (lost if change.kind == "lose" else self._draining).extend(gone)
        if not self._replicas:
            raise ValueError(f"no replica is left after {now / 1e3:g} s")
        if self._replicas != before:
            self._router.set_ready(self._replicas)
        for replica in lost:
            self.figures.gpu_ms += now - replica.began
            again, failed = replica.lose()
            self.figures.failed += failed
            self.figures.again += len(again)
            for request in again:
                self._send(request, now)
