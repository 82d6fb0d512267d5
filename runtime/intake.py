"""What front ends ask for, turned into changes of the scheduler's queue and rows, between two launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from runtime import messages as m
from runtime.lifecycle import Request
from runtime.links import Links
from runtime.publisher import Publisher
from runtime.registry import Registry, Tracked
from runtime.request import FinishReason
from runtime.scheduler import NeverFits, Scheduler


class Intake:
    """Takes messages in the order in which they arrived.

    max_queue: requests that may wait for a row. clock: seconds, monotonic.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        registry: Registry,
        publisher: Publisher,
        links: Links,
        stats: Callable[[], m.EngineStats],
        max_queue: int,
        clock: Callable[[], float],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._scheduler = scheduler
        self._registry = registry
        self._publisher = publisher
        self._links = links
        self._stats = stats
        self._max_queue = max_queue
        self._clock = clock

    def take(self) -> None:
        """Everything that has arrived."""
        for owner, message in self._links.receive():
            match message:
                case m.Submit():
                    self._submit(owner, message)
                case m.Cancel():
                    self._drop(self._registry.by_handle(owner, message.handle), message.reason)
                case m.Abort():
                    self._abort(owner, message)
                case m.StatsQuery():
                    self._links.send(owner, m.StatsReply(message.call, self._stats()))
                case None:
                    self._lose(owner)

    def _submit(self, owner: int, submit: m.Submit) -> None:
        refusal = self._refusal(submit)
        if refusal is not None:
            self._links.send(owner, refusal)
            return
        now = self._clock()
        prompt = np.frombuffer(submit.prompt, np.int32)
        request = Request(
            owner=owner,
            handle=submit.handle,
            request_id=submit.request_id,
            prompt=prompt,
            sampling=submit.sampling,
            stopping=submit.stopping,
            max_len=min(prompt.size + submit.stopping.max_tokens, self._scheduler.limits.context_length),
            priority=submit.priority,
            salt=submit.cache_salt,
            prompt_ids=np.frombuffer(submit.prompt_ids, np.int32),
            block_keys=submit.block_keys,
        )
        try:
            self._scheduler.submit(request)
        except NeverFits as error:
            field = "prompt" if error.prompt_alone else "stopping.max_tokens"
            self._links.send(owner, m.Refused(submit.handle, "INVALID_ARGUMENT", str(error), field))
            return
        self._registry.add(Tracked(request, now))
        self._links.send(owner, m.Accepted(submit.handle))
        if self._registry.was_aborted_early(submit.request_id, now):
            self._end(request)

    def _refusal(self, submit: m.Submit) -> m.Refused | None:
        """Why it is not taken. What a request can get wrong by itself, the front end has mostly refused before."""
        if self._registry.by_id(submit.request_id) is not None:
            return m.Refused(submit.handle, "ALREADY_EXISTS", "a request with this id is being served", "request_id")
        if len(self._scheduler.waiting) >= self._max_queue + self._scheduler.rows.free:
            return m.Refused(submit.handle, "RESOURCE_EXHAUSTED", f"{self._max_queue} requests are waiting already")
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

    def _abort(self, owner: int, abort: m.Abort) -> None:
        ids = abort.request_ids
        if abort.all_requests:
            ids = tuple(tracked.request.request_id for tracked in self._registry.all())
        outcomes = tuple(self._abort_one(request_id) for request_id in ids)
        self._links.send(owner, m.AbortResult(abort.call, ids, outcomes))

    def _abort_one(self, request_id: str) -> str:
        tracked = self._registry.by_id(request_id)
        if tracked is not None:
            self._end(tracked.request)
            return "ABORTED"
        if self._registry.has_finished(request_id):
            return "ALREADY_FINISHED"
        self._registry.abort_early(request_id, self._clock())
        return "NOT_FOUND"

    def _end(self, request: Request) -> None:
        """Aborted, and its stream is told."""
        self._publisher.end(self._scheduler.stop(request, FinishReason.ABORTED), self._clock())

    def _drop(self, tracked: Tracked | None, reason: FinishReason) -> None:
        """Ended without a word: nobody listens any more."""
        if tracked is not None:
            self._scheduler.stop(tracked.request, reason)
            self._registry.remove(tracked.request)

    def _lose(self, owner: int) -> None:
        self.counters["front_ends_lost"] += 1
        for tracked in self._registry.of_owner(owner):
            self._drop(tracked, FinishReason.CANCELLED)
