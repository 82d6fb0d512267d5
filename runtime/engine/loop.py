"""The engine's loop: one for every depth.

take what arrived; while the ledger has room, plan, stage, launch; wait for the oldest mark;
commit and retire what it allows; publish
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from runahead.cuda_graphs.device import Device, DeviceError
from runahead.cuda_graphs.rings import FAULT_NONE, STATUS_FAULT
from runahead.runtime.engine.engine_stats import chain_facts, engine_stats
from runahead.runtime.engine.figures import Figures, IntervalLog, LogMode, LoopTimes, Recorder, Snapshot, Totals, totals
from runahead.runtime.engine.intake import TURN_WORK, Intake
from runahead.runtime.engine.links import Links
from runahead.runtime.engine.live_requests import Registry, Structured
from runahead.runtime.engine.poison import Poison
from runahead.runtime.engine.prompt_calls import prompt_calls
from runahead.runtime.engine.publisher import Publisher
from runahead.runtime.engine.row_check import check_rows
from runahead.runtime.masks.masks import Masks
from runahead.runtime.plan import shape_of, stage
from runahead.runtime.scheduler.ledger import Launch, Ledger, LedgerError
from runahead.runtime.scheduler.outcomes import Deferred, PromptLogprobRange
from runahead.runtime.scheduler.plan_builder import launch_of
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.watchdog import Watchdog
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import LAUNCH_TIMEOUT_S
from runahead.runtime.wire.figures import EngineStats
from runahead.runtime.wire.parameters import FinishReason

_WAIT_S: Final = 0.25  # most seconds of one wait


class Engine:
    """Runs the chain: admits requests, enqueues launches, publishes tokens.

    max_queue: requests that may wait for a row. launch_timeout_s: how long launches may be in flight without any mark,
    and requests be served without progress. log_interval, log_mode: see `runahead.runtime.engine.figures`;
    snapshots go to `write_snapshot`. run_ahead_asked: the configured depth, which `Stats` shows beside the depth
    reached; None: the ledger's. masks: makes the masks of rows with a grammar; None: none has one. clock: seconds,
    monotonic. turn_work: see `Intake`.
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
        log_interval: int = 0,
        log_mode: LogMode = LogMode.EVENTS,
        write_snapshot: Callable[[Snapshot], None] = lambda snapshot: None,
        run_ahead_asked: int | None = None,
        masks: Masks | None = None,
        clock: Callable[[], float] = time.monotonic,
        turn_work: int = TURN_WORK,
    ) -> None:
        self.device = device
        self.scheduler = scheduler
        self.ledger: Ledger[Deferred] = scheduler.ledger
        self.figures = Figures()
        self.structured = Structured(masks or Masks(), scheduler.holdings, scheduler.limits)
        self.registry = Registry(self.structured.ended)
        self.publisher = Publisher(links, scheduler.holdings, device.rings, self.registry)
        self._prompt_calls = prompt_calls(device, scheduler)
        self._links = links
        self._poison = poison
        self._clock = clock
        self._watchdog = Watchdog(launch_timeout_s, clock)
        self._run_ahead_asked = self.ledger.run_ahead if run_ahead_asked is None else run_ahead_asked
        self.recorder = Recorder()
        self.times = LoopTimes(clock, self.recorder.waited)
        self._interval_log = IntervalLog(log_interval, log_mode, write_snapshot, self._totals(self.ledger.launched))
        self.stage = stage
        front_ends: Counter[str] = Counter()
        self._gather_stats = partial(
            engine_stats, scheduler, device, self.figures, self.publisher.latencies, self._run_ahead_asked, front_ends,
            self.times, self.registry.announced, self.structured.masks,
        )  # fmt: skip
        self.intake = Intake(
            scheduler, self.registry, self.publisher, links, self.structured, self._gather_stats, self.recorder.trace,
            front_ends, max_queue, clock, turn_work,
        )  # fmt: skip
        self._logging_drain_s = 0.0  # drain time of the next logging barrier so far
        self.waits = 0  # grows while the loop turns, drains included
        self._idle_after = self.ledger.launched  # the newest launch when the loop was last idle

    # ------------------------------------------------------------ the loop

    def run(self, stopping: Callable[[], bool]) -> None:
        """Turn until `stopping`, then drain. Raises DeviceError, CellError or LedgerError if the chain broke."""
        while not stopping():
            self.turn()
        self.drain("shutdown")

    def turn(self) -> None:
        """One turn of the loop."""
        self.intake.take()
        if self.structured.requests:
            self._end_lost()
        self._give_back()
        # Bounded: behind a barrier there is always room, and arrivals would keep waiting.
        last = self.ledger.launched + max(1, self.ledger.run_ahead)
        while self.ledger.launched < last and self._has_room() and (self._launch_next() or self._give_back()):
            pass
        self._wait()
        self._settle()

    def drain(self, reason: str) -> None:
        """Run a barrier: wait until every launch has retired, then compare the device's rows with the host's. reason:
        under which the barrier is counted."""
        self.figures.barrier(reason, self._drain())

    def _drain(self) -> float:
        """Drain the chain. Returns the seconds it took."""
        begun = self._clock()
        while self.ledger.in_flight:
            self._wait_for_mark((), _WAIT_S)  # arrivals are taken afterwards
            self._settle()
        check_rows(self.device.read_rows(), self.scheduler)
        return self._clock() - begun

    def _has_room(self) -> bool:
        """Return whether another launch may be enqueued now. Counts the times when only a bound on launches with
        prompts forbids it."""
        ledger = self.ledger
        if not ledger.has_room:
            return False
        fits = ledger.has_room_for_calls(self._prompt_calls, self.device.calls_at_once)
        if fits and ledger.prompt_room >= self.scheduler.limits.max_prefill_tokens:
            return True  # for any plan
        tokens = self.scheduler.prompt_tokens_wanted()
        if not tokens or (fits and ledger.has_room_for(tokens)):
            return True
        self.figures.held_back += 1
        return False

    def _launch_next(self) -> bool:
        """Plan, stage and enqueue a launch. Returns False if there is nothing to launch."""
        rings, ledger = self.device.rings, self.ledger
        is_barrier = self._interval_log.drains_before(ledger.launched + 1)
        if is_barrier and (ledger.in_flight or len(self.registry)):
            self._logging_drain_s += self._drain()
        plan_s = self._clock()
        planned = self.scheduler.plan()
        self.publisher.wait_times.planned(self.scheduler.waiting.reasons(), plan_s)
        if planned is None:
            return False
        plan = planned.plan
        if is_barrier:
            self._interval_log.drained(self._totals(ledger.launched))
            self.figures.barrier("logging", self._logging_drain_s)
            self._logging_drain_s = 0.0
        if plan.number - rings.layout.slots > ledger.retired:
            raise LedgerError(f"plan {plan.number} would overwrite the ring slot of a launch that has not retired")
        ring_slot = rings.slot(plan.number)
        body = rings.plan[ring_slot]
        stage_s = self._clock()
        self.stage(plan, body, rings.bulk[ring_slot])
        first = self._idle_after == ledger.launched
        overlapped = not first and self.device.ended() < ledger.launched
        shape = shape_of(body)
        launch = launch_of(planned, shape, first=first, overlapped=overlapped, calls=self.device.calls(shape))
        launch_s = self._clock()
        self.device.launch(launch.shape)
        self.recorder.enqueued(plan.number, plan_s, stage_s, launch_s, self._clock())
        ledger.enqueue(launch)
        self.figures.enqueued(launch, ledger.uncommitted)
        if planned.events:
            self.figures.lifecycle(planned.events, launch)
        for admission in plan.admissions:
            request = self.scheduler.holdings.request(admission.slot)
            self.publisher.admitted(request, self._clock())
            self.structured.admitted(request)
        return True

    def _wait(self) -> None:
        """Wait for the oldest outstanding mark or an arrival."""
        ledger = self.ledger
        has_more = self.scheduler.waiting.search_further()  # work without a mark or an arrival
        wait_s = 0.0 if has_more else self.intake.wait_s(_WAIT_S)
        has_more = has_more or self.intake.has_more
        if ledger.in_flight:
            self._wait_for_mark(self._links.wake_fds(), wait_s)
            return
        self.waits += 1
        if has_more:
            return
        if len(self.registry):
            raise LedgerError(f"nothing is in flight and {len(self.registry)} requests wait")
        self._idle_after = ledger.launched
        begun = self._clock()
        self._links.beat(begun)
        self._links.wait(wait_s)
        self.times.had_nothing_to_do(begun)

    def _wait_for_mark(self, wake_fds: Sequence[int], wait_s: float) -> None:
        """Wait for the oldest outstanding mark or one of these descriptors, at most wait_s."""
        ledger, begun = self.ledger, self._clock()
        self.waits += 1
        self._links.beat(begun)
        sampled, ended, in_tail = ledger.awaited
        self.device.wait(sampled, ended, wake_fds, wait_s, in_tail)
        self.times.waited(begun)

    def _settle(self) -> None:
        """Commit, retire and release what the marks allow."""
        sampled, ended, in_tail = self.device.sampled(), self.device.ended(), self.device.in_tail()
        # With several ranks a launch may be sampled on one while its predecessor has not ended on another. The
        # fence follows the end mark, and tokens wait for it, because results of the previous F are read first.
        sampled = min(sampled, ended + 1)
        seen_s = self._clock()
        before = self.ledger.ended
        self.ledger.end(ended, in_tail)
        for number in range(before + 1, ended + 1):
            self._raise_fault(number)
        self._retire(seen_s)
        while self.ledger.committed < sampled:
            self._commit(self.ledger.next_to_commit())
            self._retire(seen_s)
        self._give_back()
        freed = self.scheduler.holdings.make_some_findable()
        if self._poison is not None:
            self._poison.release(freed)
        self._check_progress()

    def _retire(self, seen_s: float) -> None:
        """Read the results of launches that have retired, before the tokens of later ones are committed.

        seen_s: when the loop saw their end, on its clock.
        """
        rings = self.device.rings
        for launch in self.ledger.retire():
            number, rows = launch.number, launch.row_slots
            ring_slot = rings.slot(number)
            self.figures.retire(launch, rings, ring_slot)
            self.recorder.retired(launch, seen_s, rings, ring_slot)
            finite = rings.finite[ring_slot, : rows.size] == 1
            if np.count_nonzero(finite) < rows.size:
                self.scheduler.holdings.not_finite(rows[~finite])
            for prompt_range in launch.prompt_logprob_ranges:
                self._publish_prompt(ring_slot, prompt_range)
            if self._interval_log.is_logged(number):
                launch_s = int(rings.end_ns[ring_slot] - rings.start_ns[ring_slot]) / 1e9
                self._interval_log.retired(launch, launch_s, self._totals(number), self.scheduler.pool)
            if self._poison is not None:
                self._poison.ring_slot(number)

    def _publish_prompt(self, ring_slot: int, prompt_range: PromptLogprobRange) -> None:
        """Publish log-probabilities of a prompt, unless its request has ended. A request whose row is not finite ends
        now."""
        if self.scheduler.rows.epoch[prompt_range.row_slot] != prompt_range.epoch:
            return
        if self.scheduler.rows.finite[prompt_range.row_slot]:
            self.publisher.publish_prompt(ring_slot, prompt_range)
        else:
            self.publisher.end(self.scheduler.stop(prompt_range.request, FinishReason.NON_FINITE), self._clock())
            self.registry.remove(prompt_range.request)

    def _give_back(self) -> bool:
        """Release what the fence lets go. After an end outside a commit that may be possible before any mark moves.

        Returns False if there was nothing.
        """
        due = self.ledger.due()
        for resource in due:
            freed = self.scheduler.release(resource)
            if self._poison is not None:
                self._poison.release(freed)
        return bool(due)

    def _end_lost(self) -> None:
        """End the requests that will get no more masks."""
        for request, reason in self.structured.lost(self._clock()):
            self.publisher.end(self.scheduler.stop(request, reason), self._clock())
            self.registry.remove(request)

    def _check_progress(self) -> None:
        ledger, counters = self.ledger, self.scheduler.tally.counters
        marks = (ledger.committed, ledger.tail, ledger.ended)
        work = (counters["generated_tokens"], counters["prefill_chunks"])
        self._watchdog.check(ledger.in_flight, marks, len(self.registry), work)

    def _commit(self, launch: Launch) -> None:
        rings = self.device.rings
        number = launch.number
        slot, count, drafts = rings.slot(number), launch.sample_slots.size, launch.shape.sample_drafts
        cells = rings.cells[slot, :count, : 1 + drafts]
        drafted = rings.drafted[slot, :count] if drafts else None
        commit_s = self._clock()
        # A launch without sampled rows may still have rows that crossed a block boundary.
        commit = self.scheduler.commits.commit(launch, cells, drafted)
        publish_s = self._clock()
        if launch.shape.sample_rows:
            self.publisher.publish(commit, publish_s)
            for ending in commit.endings:
                self.registry.remove(ending.request)
            if self.structured.requests:
                self.structured.committed(commit, launch.shape.drafts, launch.guesses)
        self.recorder.committed(number, commit_s, publish_s, self._clock())
        self.ledger.commit(number)

    def _raise_fault(self, number: int) -> None:
        fault = int(self.device.rings.status[self.device.rings.slot(number), STATUS_FAULT])
        if fault != FAULT_NONE:
            raise DeviceError(f"launch {number} ended with fault {fault}: the device was handed another launch's plan")

    def stats(self) -> EngineStats:
        """Return the figures of `Stats` at this moment."""
        return self._gather_stats()

    def facts(self, info: m.EngineInfo) -> dict[str, object]:
        """Return the chain's configuration by name."""
        return chain_facts(self.scheduler, self.device, self._interval_log, self._watchdog, info, self._run_ahead_asked)

    def _totals(self, launch: int) -> Totals:
        tokens, drafts = self.scheduler.tally.counters["generated_tokens"], self.scheduler.drafts
        return totals(launch, tokens, drafts, self.figures, self.times)
