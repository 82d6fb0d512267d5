"""One replica: its chain of launches, its rows and its prefix cache.

The rules are those of docs/architecture.md: launch m is planned when launch m - run_ahead starts, and the tokens of a
launch's F are sampled when the next launch starts. While no row begins or ends, all launches to the next event are one
step of the simulation. Simplified: answers end by their length, a request holds blocks for its whole answer from its
admission on, so that no row pauses or is evicted, and callers take no turns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf

from benchmarks.fleet.costs import Costs
from benchmarks.fleet.figures import Figures
from benchmarks.fleet.traffic import Request

_Row = tuple[int, int, Request]  # the first launch that it is not in, a number, its request


class Prefixes:
    """Blocks that can be found again, least recently used first: tenants' prefixes, and what other requests left.

    events: (ms, tenant, stored) of prefixes that were stored or evicted; the reader clears them.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0  # tokens of running requests, prefixes aside
        self.cached = 0
        self.events: list[tuple[float, int, bool]] = []
        self._entries: dict[int, int] = {}  # tokens by tenant, or by a negative number for what no one finds

    def find(self, tenant: int) -> int:
        """Tokens of the prefix that are there; it is used now."""
        tokens = self._entries.pop(tenant, 0)
        if tokens:
            self._entries[tenant] = tokens
        return tokens

    def store(self, at: float, key: int, tokens: int) -> None:
        if key not in self._entries:
            self.cached += tokens
            self.make_room(at)
            self._entries[key] = tokens
            if key >= 0:
                self.events.append((at, key, True))

    def make_room(self, at: float) -> None:
        """Evict until all that is held or can be found fits."""
        entries = self._entries
        while self.held + self.cached > self.capacity and entries:
            key = next(iter(entries))
            self.cached -= entries.pop(key)
            if key >= 0:
                self.events.append((at, key, False))


@dataclass(slots=True)
class _Prompt:
    """A prompt in prefill. computed: tokens that are computed or cached when the last planned launch has ended."""

    request: Request
    computed: int


class Replica:
    """Times in ms. number: in its fleet. began: since when it has a GPU. ready: when its first request may come."""

    def __init__(self, number: int, costs: Costs, figures: Figures, began: float = 0.0, ready: float = 0.0) -> None:
        self.number, self.costs, self.began = number, costs, began
        self.waiting = deque[Request]()
        self.prefixes = Prefixes(costs.kv_tokens)
        self.end = ready  # of the last launch
        self._figures = figures
        self._decode_ms = costs.decode_table()
        self._prompts = list[_Prompt]()
        self._rows: list[_Row] = []  # a heap
        self._launches = self._keys = 0
        self._starts = deque([ready] * costs.run_ahead, costs.run_ahead)  # of the last launches
        self._fresh = deque[tuple[float, int, int]]()  # from when on a tenant's prefix can be found

    @property
    def running(self) -> int:
        """Requests with a row."""
        return len(self._rows) + len(self._prompts)

    def submit(self, request: Request, now: float) -> None:
        """It arrives at `now`, up to which the replica was advanced."""
        if not (self.running or self.waiting) and now > self._starts[0]:
            self._starts = deque([now] * self.costs.run_ahead, self.costs.run_ahead)  # the chain begins anew
            self.end = max(self.end, now)
        self.waiting.append(request)

    def advance(self, until: float) -> None:
        """Run every launch that is planned before `until`."""
        rows = self._rows
        while (rows or self._prompts or self.waiting) and self._starts[0] < until:
            if self._prompts or self._has_room():
                self._launch_with_prompts()
            else:
                self._decode(until)
            while rows and rows[0][0] <= self._launches:
                self._finish(*heappop(rows)[1:])
        self._store_prefixes(until)

    def lose(self) -> tuple[list[Request], int]:
        """It is gone: its requests without a first token, and how many others it had."""
        without = [*(prompt.request for prompt in self._prompts), *self.waiting]
        failed = len(self._rows)
        self.waiting.clear()
        self._prompts.clear()
        self._rows.clear()
        return without, failed

    def _decode(self, until: float) -> None:
        """Run all launches up to the next end of a row, or to the first that is planned at `until` or later."""
        rows, starts, ahead = len(self._rows), self._starts, self.costs.run_ahead
        ms = self._decode_ms[rows]
        count = self._rows[0][0] - self._launches
        if until <= self.end:
            count = min(count, sum(start < until for start in starts))
        elif until < inf:
            count = min(count, ceil((until - self.end) / ms) + ahead)
        for place in range(max(0, count - ahead), count):
            starts.append(self.end + place * ms)
        self.end += count * ms
        self._launches += count
        self._figures.launches += count
        self._figures.gaps.add(ms, count * rows)

    def _launch_with_prompts(self) -> None:
        costs, rows, prompts = self.costs, len(self._rows), self._prompts
        planned_at = self._starts[0]
        self._store_prefixes(planned_at)
        left = costs.mixed_prefill_tokens if rows else costs.max_prefill_tokens
        tokens = taken = 0
        while left > 0 and (taken < len(prompts) or self._admit(planned_at)):
            prompt = prompts[taken]
            until = (prompt.computed // costs.prefill_chunk + 1) * costs.prefill_chunk
            chunk = min(until, prompt.request.prompt) - prompt.computed
            if chunk > left and tokens:
                break
            prompt.computed += chunk
            tokens, left, taken = tokens + chunk, left - chunk, taken + 1
        ms = max(self._decode_ms[rows + taken], costs.prompt_ms[0] + costs.prompt_ms[1] * (tokens + rows))
        self._starts.append(self.end)
        self.end += ms
        self._launches += 1
        self._figures.launches += 1
        if rows:
            self._figures.gaps.add(ms, rows)
        self._begin_rows()

    def _store_prefixes(self, now: float) -> None:
        """A prefix can be found once the launch that completed it has ended."""
        while self._fresh and self._fresh[0][0] <= now:
            self.prefixes.store(*self._fresh.popleft())

    def _has_room(self) -> bool:
        """The request that waits longest can have a row and blocks for all its tokens."""
        if not self.waiting or self.running >= self.costs.max_rows:
            return False
        request = self.waiting[0]
        return not self.running or self.prefixes.held + request.prompt + request.answer <= self.prefixes.capacity

    def _admit(self, now: float) -> bool:
        """Give a row to the request that waits longest. Returns whether there was one, and room for it."""
        if not self._has_room():
            return False
        request, prefixes = self.waiting.popleft(), self.prefixes
        prefixes.held += request.own
        prefixes.make_room(now)
        cached = min(prefixes.find(request.tenant), request.prompt - 1) if request.prefix else 0
        cached -= cached % self.costs.block_size
        self._prompts.append(_Prompt(request, cached))
        self._figures.prompt_tokens += request.prompt
        self._figures.cached_tokens += cached
        return True

    def _begin_rows(self) -> None:
        """Prompts are complete when the last launch ends: the next one samples their first tokens."""
        first = self.end + self.costs.overhead_ms
        for prompt in self._prompts:
            request = prompt.request
            if prompt.computed < request.prompt:
                continue
            request.first = first
            self._figures.first.add(first - request.arrived)
            if request.prefix:
                self._fresh.append((self.end, request.tenant, request.prefix))
            self._keys += 1
            heappush(self._rows, (self._launches + request.answer - 1, self._keys, request))
        self._prompts = [prompt for prompt in self._prompts if prompt.computed < prompt.request.prompt]

    def _finish(self, key: int, request: Request) -> None:
        self.prefixes.held -= request.own
        self.prefixes.store(self.end, -key, request.own)
        self._figures.finish(request, self.end + self.costs.overhead_ms)
