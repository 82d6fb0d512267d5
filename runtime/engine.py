"""The engine's loop: one for every depth.

take what arrived; while the ledger has room, plan, stage, launch; wait for the oldest mark; commit and retire what
it allows; publish.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from cuda_graphs.device import Device, DeviceError
from cuda_graphs.rings import FAULT_NONE, STATUS_FAULT
from runtime import messages as m
from runtime.config import LAUNCH_TIMEOUT_S
from runtime.figures import Figures
from runtime.intake import Intake
from runtime.ledger import Launch, Ledger, LedgerError
from runtime.links import Links
from runtime.plan import stage
from runtime.publisher import Publisher
from runtime.registry import Registry
from runtime.row_check import check_rows
from runtime.scheduler import Release, Scheduler
from runtime.stats import engine_stats
from runtime.watchdog import Watchdog

_NEVER: Final = 1 << 62
_WAIT_S: Final = 0.25  # a wait that sees no mark ends after this long, and the loop looks again


class Poison(Protocol):
    """The test mode: whatever is given back is filled with nonsense."""

    def ring_slot(self, number: int) -> None: ...

    def release(self, resource: Release) -> None: ...


@dataclass(frozen=True, slots=True)
class Barrier:
    """Why the chain is drained before the next plan."""

    reason: str


class Engine:
    """Requests in, tokens out, launches in between.

    max_queue: requests that may wait for a row. launch_timeout_s: how long launches may be in flight without any mark.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        device: Device,
        scheduler: Scheduler,
        links: Links,
        *,
        max_queue: int,
        poison: Poison | None = None,
        launch_timeout_s: float = LAUNCH_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device = device
        self.scheduler = scheduler
        self.ledger: Ledger[Release] = scheduler.ledger
        self.figures = Figures()
        self.registry = Registry()
        self.publisher = Publisher(links, scheduler.rows, device.rings, self.registry, self.figures)
        self.intake = Intake(scheduler, self.registry, self.publisher, links, self.stats, max_queue, clock)
        self._links = links
        self._poison = poison
        self._clock = clock
        self._watchdog = Watchdog(launch_timeout_s, clock)
        self._started_at = clock()
        self._idle_after = 0  # the newest launch when the loop last had nothing to do

    # ------------------------------------------------------------ the loop

    def run(self, stopping: Callable[[], bool]) -> None:
        """Turn until `stopping`, then drain. Raises DeviceError or LedgerError if the chain broke."""
        while not stopping():
            self.turn()
        self.drain(Barrier("shutdown"))

    def turn(self) -> None:
        """One turn of the loop."""
        begun = self._clock()
        self.intake.take()
        self._give_back()
        while self._has_room() and self._launch_next():
            pass
        waited = self._wait()
        self._settle()
        self.figures.host_s += self._clock() - begun - waited

    def drain(self, barrier: Barrier) -> None:
        """Wait until everything enqueued has retired, then compare the device's rows with the host's."""
        begun = self._clock()
        while self.ledger.in_flight:
            self._wait()
            self._settle()
        check_rows(self.device.read_rows(), self.scheduler)
        self.figures.barrier(barrier.reason, self._clock() - begun)

    def _has_room(self) -> bool:
        """May another launch be enqueued now? Counts those that only the bound in tokens holds back."""
        ledger = self.ledger
        if not ledger.has_room:
            return False
        if ledger.has_room_for(self.scheduler.prompt_tokens_wanted()):
            return True
        self.figures.held_back += 1
        return False

    def _launch_next(self) -> bool:
        """Plan, stage, launch. False if there is nothing to launch."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        rings, ledger = self.device.rings, self.ledger
        if plan.number - rings.layout.slots > ledger.retired:
            raise LedgerError(f"plan {plan.number} would overwrite a slot of a launch that has not retired")
        slot = rings.slot(plan.number)
        stage(plan, rings.plan[slot], rings.bulk[slot])
        first = self._idle_after == ledger.launched
        overlapped = not first and self.device.ended() < ledger.launched
        launch = self.scheduler.launch_of(plan, first, overlapped)
        self.device.launch(launch.shape)
        ledger.enqueue(launch)
        self.figures.enqueued(launch, ledger.uncommitted)
        for admission in plan.admissions:
            self.registry.admitted(self.scheduler.by_slot[admission.slot], self._clock())
        return True

    def _wait(self) -> float:
        """For the oldest mark outstanding, or an arrival. Returns the seconds it took."""
        begun = self._clock()
        ledger = self.ledger
        if ledger.waits_for_tokens:
            self.device.wait(ledger.committed, _NEVER, self._links.wake_fds(), _WAIT_S)
        elif ledger.in_flight:
            self.device.wait(_NEVER, ledger.ended, self._links.wake_fds(), _WAIT_S)
        elif len(self.registry):
            raise LedgerError(f"nothing is in flight and {len(self.registry)} requests wait")
        else:
            self._idle_after = ledger.launched
            self._links.wait(_WAIT_S)
        return self._clock() - begun

    def _settle(self) -> None:
        """Commit, retire and give back what the marks allow."""
        sampled = self.device.sampled()
        # The S of a launch runs after the F of the one before.
        ended = max(self.device.ended(), sampled - 1)
        before = self.ledger.ended
        self.ledger.end(ended)
        for number in range(before + 1, ended + 1):
            self._raise_fault(number)
        while self.ledger.committed < sampled:
            self._commit(self.ledger.next_to_commit())
        for launch in self.ledger.retire():
            self.figures.retire(launch, self.device.rings)
            if self._poison is not None:
                self._poison.ring_slot(launch.number)
        self._give_back()
        self._watchdog.look(self.ledger.in_flight, self.ledger.committed, self.ledger.ended)

    def _give_back(self) -> None:
        """Whatever the fence lets go: what ended outside a commit may be due before any mark moves."""
        for resource in self.ledger.due():
            if self._poison is not None:
                self._poison.release(resource)
            self.scheduler.release(resource)

    def _commit(self, launch: Launch) -> None:
        rings = self.device.rings
        cells = rings.cells[rings.slot(launch.number), : launch.sample_slots.size, 0]
        if launch.shape.sample_rows:
            commit = self.scheduler.commit(launch, cells)
            self.publisher.publish(commit, self._clock())
        self.ledger.commit(launch.number)

    def _raise_fault(self, number: int) -> None:
        fault = int(self.device.rings.status[self.device.rings.slot(number), STATUS_FAULT])
        if fault != FAULT_NONE:
            raise DeviceError(f"launch {number} ended with fault {fault}: the device was handed another launch's plan")

    def stats(self) -> m.EngineStats:
        """Everything `Stats` shows, at this moment."""
        return engine_stats(self.scheduler, self.device, self.figures, self.intake.counters, self._uptime_s())

    def _uptime_s(self) -> float:
        return self._clock() - self._started_at
