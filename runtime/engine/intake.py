"""Front ends' messages, applied to the scheduler's queue and rows between two launches.

A turn of the loop does a bounded amount of this work; the rest follows in order in later turns. To abort thousands of
requests takes several turns, with exact results.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from runahead.runtime.engine.links import Links
from runahead.runtime.engine.live_requests import Announced, Registry, Structured, Tracked
from runahead.runtime.engine.publisher import KvFollowers, Publisher
from runahead.runtime.scheduler.request import NeverFits, Request, sampling_of
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.figures import EngineStats, Trace
from runahead.runtime.wire.kv_events import KvQuery
from runahead.runtime.wire.parameters import FinishReason

TURN_WORK: Final = 4  # pieces of work in a turn, about 10 µs each: a request queued, one ended
_LONG_BYTES: Final = 1 << 16  # bytes of a message for one more piece of work
_STATS_WORK: Final = 3  # pieces of work for encoding an answer
_TRACED_WORK: Final = 8  # launches of a trace for one more piece of work
STATS_S: Final = 0.02  # least time between two gatherings; calls in between get the next figures


class Intake:
    """Takes messages in the order of arrival.

    structured: gets the requests with a grammar. stats: gathers the answer to a `StatsQuery`. trace: returns the record
    of the newest launches, so many. counters: of front ends' actions, counted here. max_queue: requests that may wait
    for a row. clock: seconds, monotonic. turn_work: pieces of work in a turn.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        registry: Registry,
        publisher: Publisher,
        links: Links,
        structured: Structured,
        stats: Callable[[], EngineStats],
        trace: Callable[[int], Trace],
        counters: Counter[str],
        max_queue: int,
        clock: Callable[[], float],
        turn_work: int = TURN_WORK,
    ) -> None:
        self.counters = counters
        self._scheduler = scheduler
        self._registry = registry
        self._publisher = publisher
        self._links = links
        self._structured = structured
        self._stats = stats
        self._trace = trace
        self._max_queue = max_queue
        self._clock = clock
        self._turn_work = turn_work
        self._doing: Iterator[int] | None = None  # the work that was begun and has not ended
        self._asked: deque[tuple[int, int]] = deque()  # (front end, call) of calls that wait for Stats
        self._answers: deque[tuple[int, m.StatsReply]] = deque()  # not sent yet
        self._gathered_at = -STATS_S
        self._followers = KvFollowers(links, (scheduler.pool, scheduler.holdings.snapshots))

    def take(self) -> None:
        """Apply arrived messages, up to a turn's work."""
        self._give_way()
        arrived, left = iter(self._links.receive()), self._turn_work
        self._gather()
        self._followers.answer()
        while left > 0:
            if self._doing is not None:
                work = next(self._doing, 0)
                left -= work
                self._doing = self._doing if work else None
            elif self._answers:
                self._links.send(*self._answers.popleft())
                left -= _STATS_WORK
            elif (message := next(arrived, None)) is not None:
                self._doing = self._begin(*message)
            else:
                return

    def _give_way(self) -> None:
        """Evict a row for a caller that has lacked one for too long, if nothing else makes room."""
        request = self._scheduler.waiting.choose_row_to_yield(self._clock(), self._scheduler.limits.patience_s)
        if request is not None:
            request.gives_way = True
            self._scheduler.evict(request)

    @property
    def has_more(self) -> bool:
        """Return whether earlier arrivals leave work for the next turn."""
        return self._doing is not None or bool(self._answers) or self._links.has_more

    def wait_s(self, most_s: float) -> float:
        """Return how long the loop may wait for events: 0 with work left, else until an answer is due, most_s at
        most."""
        if self.has_more or self._followers.has_more:
            return 0.0
        if self._asked:
            return min(most_s, max(0.0, self._gathered_at + STATS_S - self._clock()))
        return most_s

    def _begin(self, owner: int, message: m.ToEngine | None) -> Iterator[int]:
        """Apply a message, and yield the amount of work after each piece."""
        match message:
            case m.Submit():
                self._submit(owner, message)
                size = len(message.prompt) + len(message.prompt_ids) + len(message.block_keys)
                yield message.n + size // _LONG_BYTES
            case m.Announce():
                self._announce(owner, message)
                yield 1
            case m.Cancel():
                self._registry.announced.take(owner, message.handle)
                self._drop(self._registry.by_handle(owner, message.handle), message.reason)
                yield 1
            case m.Abort():
                yield from self._abort(owner, message)
            case m.StatsQuery():
                self._asked.append((owner, message.call))
                self._gather()
                yield 1
            case m.TraceQuery():
                traced = self._trace(message.launches)
                self._links.send(owner, m.TraceReply(message.call, traced))
                yield 1 + len(traced.launches) // _TRACED_WORK
            case KvQuery(call=call):
                self._followers.ask(owner, call)
                yield 1
            case None:
                yield from self._lose(owner)

    def _gather(self) -> None:
        """Gather figures for all waiting calls, unless the last ones are recent."""
        if self._asked and self._clock() - self._gathered_at >= STATS_S:
            stats, self._gathered_at = self._stats(), self._clock()
            self._answers += ((owner, m.StatsReply(call, stats)) for owner, call in self._asked)
            self._asked.clear()

    def _announce(self, owner: int, announce: m.Announce) -> None:
        at = self._clock() if announce.submitted_at is None else announce.submitted_at
        announced = Announced(owner, announce.handle, announce.request_id, at, announce.n)
        if self._registry.is_taken(announce.request_id):
            self._links.send(owner, _duplicate(announce.handle))
        elif self._registry.was_aborted_early(announce.request_id, at):
            self._end_announced(announced)
        else:
            self._registry.announced.add(announced)

    def _submit(self, owner: int, submit: m.Submit) -> None:
        announced = self._registry.announced.take(owner, submit.handle) if submit.announced else None
        if submit.announced and announced is None:
            return  # it was aborted or refused, and its stream has been told
        sent_at = self._clock() if submit.submitted_at is None else submit.submitted_at
        submitted_at = sent_at if announced is None else announced.submitted_at
        was_aborted = self._registry.was_aborted_early(submit.request_id, submitted_at)
        refusal = self._refusal(submit, needs_room=not was_aborted)
        if refusal is not None:
            self._links.send(owner, refusal)
            return
        requests = self._requests(owner, submit)
        try:
            for request in requests:  # if one fits, all do
                self._scheduler.submit(request)
        except NeverFits as error:
            field = "prompt" if error.prompt_alone else "stopping.max_tokens"
            self._links.send(owner, m.Refused(submit.handle, "INVALID_ARGUMENT", str(error), field))
            return
        for request in requests:
            waited = self._publisher.wait_times.begin(request.sampling.has_penalty, self._clock(), sent_at)
            self._registry.add(Tracked(request, submitted_at, waited))
            if submit.structure:
                self._structured.begin(request, submit.structure)
        self._links.send(owner, m.Accepted(submit.handle))
        if was_aborted:
            self._abort_one(submit.request_id)

    def _requests(self, owner: int, submit: m.Submit) -> list[Request]:
        """Return a request for each completion, by index."""
        prompt, limits = np.frombuffer(submit.prompt, np.int32), self._scheduler.limits
        prompt_ids = np.frombuffer(submit.prompt_ids, np.int32)
        requests = [
            Request(
                owner=owner,
                handle=submit.handle + index,
                request_id=submit.request_id,
                prompt=prompt,
                sampling=submit.sampling if not index else sampling_of(submit.sampling, index),
                stopping=submit.stopping,
                max_len=min(prompt.size + submit.stopping.max_tokens, limits.context_length),
                priority=submit.priority,
                salt=submit.cache_salt,
                caller=submit.caller,
                outranks=submit.outranks,
                prompt_ids=prompt_ids,
                block_keys=submit.block_keys,
                may_hold=bool(submit.structure),
            )
            for index in range(submit.n)
        ]
        self._scheduler.holdings.shared.share(requests)
        return requests

    def _refusal(self, submit: m.Submit, needs_room: bool) -> m.Refused | None:
        """Return why the request is refused, or None. The front end has mostly refused what a request can get wrong by
        itself.

        needs_room: it must have room in the queue. A request that was aborted before it arrived needs none: it ends as
        aborted and is not told to retry.
        """
        if self._registry.is_taken(submit.request_id):
            return _duplicate(submit.handle)
        waiting, room = len(self._scheduler.waiting), self._max_queue + self._scheduler.rows.free
        if needs_room and waiting + submit.n > room:
            why = f"{self._max_queue} requests are waiting already"
            if waiting < room:
                why = f"{waiting} requests wait, and {submit.n} more are over the limit of {self._max_queue}"
            return m.Refused(submit.handle, "RESOURCE_EXHAUSTED", why)
        if submit.sampling.has_penalty and not self._scheduler.holdings.penalty_slots.total:
            return m.Refused(
                submit.handle, "INVALID_ARGUMENT", "penalties are off on this server (penalty_slots is 0)", "sampling"
            )
        tokens, context = len(submit.prompt) // 4, self._scheduler.limits.context_length
        if not 0 < tokens < context:
            return m.Refused(
                submit.handle,
                "INVALID_ARGUMENT",
                f"the prompt has {tokens} tokens; it must have 1 to {context - 1}",
                "prompt",
            )
        return None

    def _abort(self, owner: int, abort: m.Abort) -> Iterator[int]:
        """Abort requests. "All" means all live requests: one that ended before its turn came was not aborted.

        The youngest end first, so that waiting requests get no rows meanwhile.
        """
        if abort.all_requests:
            ended = []
            for request_id in reversed(self._registry.ids()):
                work = max(1, len(self._registry.all_of(request_id)))
                if request_id.startswith(abort.reach) and self._registry.is_taken(request_id):
                    self._abort_one(request_id)
                    ended.append(request_id)
                yield work
            ended.reverse()
            self._links.send(owner, m.AbortResult(abort.call, tuple(ended), ("ABORTED",) * len(ended)))
            yield 1
            return
        found = []
        for request_id in abort.request_ids:
            work = max(1, len(self._registry.all_of(request_id)))
            found.append(self._abort_one(request_id))
            yield work
        self._links.send(owner, m.AbortResult(abort.call, abort.request_ids, tuple(found)))
        yield 1

    def _abort_one(self, request_id: str) -> str:
        if found := self._registry.all_of(request_id):
            for tracked in found:
                self._end(tracked.request)
            return "ABORTED"
        announced = self._registry.announced.by_id(request_id)
        if announced is not None:
            self._registry.announced.take(announced.owner, announced.handle)
            self._end_announced(announced)
            return "ABORTED"
        if self._registry.has_finished(request_id):
            return "ALREADY_FINISHED"
        self._registry.abort_early(request_id, self._clock())
        return "NOT_FOUND"

    def _end(self, request: Request) -> None:
        """End a request as aborted, and tell its stream."""
        self._publisher.end(self._scheduler.stop(request, FinishReason.ABORTED), self._clock())
        self._registry.remove(request)

    def _end_announced(self, announced: Announced) -> None:
        """End a request as aborted before its prompt arrived, and tell its stream. It was in no queue."""
        self.counters["aborted_preparing"] += 1
        self._registry.remember_finished(announced.request_id)
        self._links.send(announced.owner, m.Accepted(announced.handle))
        handles = range(announced.handle, announced.handle + announced.n)
        finished = tuple(m.Finished(handle, int(FinishReason.ABORTED)) for handle in handles)
        self._links.send(announced.owner, m.Output(0, b"", b"", (), finished))

    def _drop(self, tracked: Tracked | None, reason: FinishReason) -> None:
        """End a request without a message, because its front end no longer listens."""
        if tracked is not None:
            if reason is FinishReason.STOP:
                self._publisher.ended(tracked, self._clock())
            self._scheduler.stop(tracked.request, reason)
            self._registry.remove(tracked.request)

    def _lose(self, owner: int) -> Iterator[int]:
        """Drop a lost front end's requests, the youngest first, as in `_abort`."""
        self.counters["front_ends_lost"] += 1
        self._followers.lose(owner)
        yield 1
        for announced in self._registry.announced.of_owner(owner):
            self._registry.announced.take(owner, announced.handle)
            yield 1
        for tracked in reversed(self._registry.of_owner(owner)):
            if self._registry.by_handle(owner, tracked.request.handle) is tracked:  # it has not ended meanwhile
                self._drop(tracked, FinishReason.CANCELLED)
            yield 1


def _duplicate(handle: int) -> m.Refused:
    return m.Refused(handle, "ALREADY_EXISTS", "a request with this id is being served", "request_id")
