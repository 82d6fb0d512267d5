"""Requests in the scheduler, counts of what happened to them, and prompts that several completions share.

The first of several completions computes their prompt, and the others share its KV blocks. They join the queue when
these blocks can be found. Each computes the prompt's last tokens again, because it needs their logits. It finds the
blocks in the prefix cache, and for a model with recurrent states the state behind them. Without a prefix cache the
blocks have a salt that only these completions know, and are forgotten when each completion has had a row.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from runahead.runtime.memory.block_pool import NO_SLOT, BlockPool, SlotPool
from runahead.runtime.memory.prefix_cache import NO_SNAPSHOT, SnapshotPool
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.wire.engine_config import MOST_DRAFTS
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import PrefixKeys

MAX_EVICTIONS: Final = 3  # a request with so many evictions is protected: others of its priority are evicted first
NO_EVENTS: Final[Mapping[str, int]] = MappingProxyType({})


class NeverFits(ValueError):
    """The request is larger than the whole pool. prompt_alone: so is its prompt without a completion."""

    def __init__(self, sentence: str, prompt_alone: bool) -> None:
        super().__init__(sentence)
        self.prompt_alone = prompt_alone


@dataclass(slots=True, eq=False)
class Request:
    """A request from the queue to its end. Its slots are NO_SLOT while it waits.

    prompt_ids: the prompt's distinct ids, ascending, if it has a repetition penalty; else none. block_keys: keys of the
    prompt's full blocks, 32 bytes each, made by the front end; empty: made when needed. blocks: its KV blocks, in
    order, int32: thousands are copied at once. tokens: all its known tokens when it is admitted: the prompt, and after
    an eviction the completion so far. cached_tokens: prompt tokens found in the prefix cache at its first admission.
    shared: number of its first blocks that it found in the prefix cache. registered: number of its blocks that can be
    found once the launches that wrote them have retired. snapshots: int32, its state at each boundary that ends a
    block; NO_SNAPSHOT: none. The prefix cache owns those behind registered blocks. begins_as: the snapshot that its
    state begins as. caller: who makes the request; empty without callers. outranks: its priority counts against other
    callers' requests, too. evictions, pauses: how often it gave up its row, or waited in it, for lack of blocks.
    chunks_deferred: launches without its next chunk, because other rows used the launch's prompt tokens or plan.
    gives_way: its row leaves for a caller that has none. begun_at: number of its tokens that its row found in the
    prefix cache or that an earlier row computed. computed: number of its tokens that an evicted row had computed.
    next_prompt_logprob: position of the next prompt token whose log-probability is to be sent. last_token_s: when its
    last token before its last eviction was sent, on the engine's clock; NaN: none. may_hold: it has a grammar, so S
    holds its row while its mask is late. drafted, accepted: verified and accepted drafts of its ended rows by draft
    position, int64 [MOST_DRAFTS]. generated: tokens of its completion in ended rows. shared_prompt: the prompt that it
    shares with other completions; None: none. prompt_state: the snapshot that has its state while it computes a shared
    prompt.
    """

    owner: int
    handle: int
    request_id: str
    prompt: NDArray[np.int32]  # [prompt tokens]
    sampling: SamplingParams
    stopping: StoppingParams
    max_len: int
    priority: int = 0
    salt: str = ""
    caller: str = ""
    outranks: bool = True
    prompt_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    block_keys: bytes = b""
    order: int = 0
    row_slot: int = NO_SLOT
    penalty_slot: int = NO_SLOT
    state_slot: int = NO_SLOT
    blocks: array[int] = field(default_factory=lambda: array("i"))
    snapshots: array[int] = field(default_factory=lambda: array("i"))
    begins_as: int = NO_SNAPSHOT
    tokens: NDArray[np.int32] = field(init=False)
    keys: PrefixKeys | None = None
    cached_tokens: int = 0
    shared: int = 0
    registered: int = 0
    evictions: int = 0
    pauses: int = 0
    chunks_deferred: int = 0
    gives_way: bool = False
    begun_at: int = 0
    computed: int = 0
    next_prompt_logprob: int = 1
    last_token_s: float = math.nan
    may_hold: bool = False
    drafted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(MOST_DRAFTS, np.int64))
    accepted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(MOST_DRAFTS, np.int64))
    generated: int = 0
    shared_prompt: SharedPrompt | None = None
    prompt_state: int = NO_SNAPSHOT

    def __post_init__(self) -> None:
        self.tokens = self.prompt

    @property
    def context_limited(self) -> bool:
        """Return whether it ends at the context length before its max_tokens."""
        return self.max_len < self.prompt.size + self.stopping.max_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Return whether log-probabilities of its prompt are requested and not all sent."""
        return self.sampling.prompt_logprobs >= 0 and self.next_prompt_logprob < self.prompt.size

    @property
    def is_protected(self) -> bool:
        """Return whether it was evicted MAX_EVICTIONS times for lack of blocks."""
        return self.evictions >= MAX_EVICTIONS

    @property
    def precedence(self) -> int:
        """Its priority relative to other callers' requests."""
        return self.priority if self.outranks else 0

    @property
    def queue_order(self) -> tuple[int, bool, int]:
        """Sort key among its caller's requests: higher priority, then protected requests, then first come, first
        served.

        It changes only with an eviction, while the request is in no queue.
        """
        return -self.priority, not self.is_protected, self.order


_SEEDS = 1 << 64


@dataclass(slots=True)
class Tally:
    """Counts since the start.

    finished: requests by the name of their reason. aborted: requests that a client aborted or cancelled, by phase.
    events: lifecycle events since the last plan, by kind.
    """

    counters: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    aborted: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)

    def event(self, kind: str, times: int = 1) -> None:
        if times:
            self.events[kind] += times

    def admitted(self, request: Request, cached: int, *, searched: bool) -> None:
        """Count an admission. cached: tokens found in the prefix cache. searched: whether it was searched."""
        if request.computed:
            self.counters["recomputed_tokens"] += max(0, request.computed - cached)
            self.event("readmitted")
            return
        request.cached_tokens = cached
        self.counters["admitted"] += 1
        self.counters["prompt_tokens"] += request.prompt.size
        self.counters["cached_tokens"] += cached
        self.counters["queried_tokens"] += request.prompt.size * searched
        self.event("admitted")

    def hand_over_events(self) -> Mapping[str, int]:
        """Return the events since the last plan, and begin to count anew."""
        events, self.events = self.events, Counter()
        return events


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """A prompt of several completions.

    blocks: its shared full blocks. is_ready: they can be found, or the first completion has ended. not_begun:
    completions that have neither had a row nor ended.
    """

    first: Request
    blocks: int
    is_ready: bool = False
    not_begun: set[Request] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        """Return whether a completion may still look for the blocks."""
        return bool(self.not_begun)

    def is_awaited_by(self, request: Request) -> bool:
        """Return whether the request must not be admitted yet."""
        return request is not self.first and not self.is_ready

    def found(self, request: Request, blocks: int) -> bool:
        """Record that this completion's first `blocks` blocks can be found. Returns whether that makes the prompt
        ready."""
        return self._is_ready_by(request is self.first and blocks >= self.blocks)

    def has_ended(self, request: Request) -> bool:
        """Record that a completion has ended; nobody waits for it. Returns whether that makes the prompt ready."""
        self.not_begun.discard(request)
        return self._is_ready_by(request is self.first)

    def _is_ready_by(self, event: bool) -> bool:
        before, self.is_ready = self.is_ready, self.is_ready or event
        return self.is_ready and not before


def share(requests: Sequence[Request], blocks: int) -> None:
    """Let these completions of one prompt share its first blocks."""
    prompt = SharedPrompt(requests[0], blocks, not_begun=set(requests))
    for request in requests:
        request.shared_prompt = prompt


def sampling_of(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the sampling parameters of completion `index`: a different seed, and no log-probabilities of the prompt.
    sampling: completion 0's."""
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) % _SEEDS, prompt_logprobs=-1)


class SharedPrompts:
    """Shared prompts of an engine. snapshots, state_slots: pools of a model with recurrent states.

    For such a model the first completion computes the shared prompt with its state in a snapshot. Then it gets a state
    slot and continues from the snapshot as the others do. Nothing writes the snapshot after that.

    private_salts: how many were given out. Without a prefix cache each shared prompt has one.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        max_rows: int,
        pool: BlockPool,
        snapshots: SnapshotPool,
        state_slots: SlotPool,
    ) -> None:
        self.private_salts = 0
        self._limits = limits
        self._max_rows = max_rows
        self._pool = pool
        self._snapshots = snapshots
        self._state_slots = state_slots
        self._ready = list[SharedPrompt]()  # since the last `take_ready`

    def share(self, requests: Sequence[Request]) -> None:
        """Let these completions of one prompt, by index and not yet queued, share its full blocks.

        The block with the prompt's last token is not shared, because its logits are needed. Nothing is shared if the
        model has states and there is no snapshot for one.
        """
        size, has_state = self._pool.block_size, self._limits.has_state
        unit = lcm(size, self._limits.state_unit) if has_state else size
        blocks = (requests[0].prompt.size - 1) // unit * unit // size
        if len(requests) < 2 or not blocks or (has_state and not self._snapshots.total):
            return
        share(requests, blocks)
        if not self._limits.finds_prefixes:
            self.private_salts += 1
            for request in requests:
                request.salt, request.block_keys = str(self.private_salts), b""

    def may_find(self, request: Request) -> bool:
        """Return whether blocks of the request may be found, by it and by others."""
        prompt = request.shared_prompt
        return self._limits.finds_prefixes or (prompt is not None and prompt.is_open)

    def most_findable(self, request: Request) -> int:
        """Return how many of the row's blocks may be found.

        The last block of a shared prompt may not while the row's state is still in the snapshot. Without a prefix cache
        only the blocks of a shared prompt may.
        """
        prompt = request.shared_prompt
        if not self.may_find(request):
            return 0
        if prompt is None:
            return len(request.blocks)
        if request.state_slot >= self._max_rows:
            return prompt.blocks - 1
        if self._limits.finds_prefixes:
            return len(request.blocks)
        return prompt.blocks if prompt.first is request else 0

    # ------------------------------------------------------------ completions come and go

    def has_begun(self, request: Request) -> None:
        """Record that the request got a row, which begins with blocks that were found."""
        prompt = request.shared_prompt
        if prompt is not None and prompt.is_open:
            self.found(request, len(request.blocks))
            prompt.not_begun.discard(request)
            self._forget(prompt)

    def found(self, request: Request, blocks: int) -> None:
        """Record that the request's first `blocks` blocks can be found."""
        prompt = request.shared_prompt
        if prompt is not None and prompt.found(request, blocks):
            self._ready.append(prompt)

    def take_ready(self) -> list[SharedPrompt]:
        """Return the prompts whose other completions may be admitted from now on, each once."""
        taken, self._ready = self._ready, []
        return taken

    def has_ended(self, request: Request) -> None:
        """Record that the request has ended."""
        prompt = request.shared_prompt
        if prompt is not None and prompt.is_open:
            if prompt.has_ended(request):
                self._ready.append(prompt)
            self._forget(prompt)

    def _forget(self, prompt: SharedPrompt) -> None:
        """Forget the prompt's blocks when each completion has begun or ended and there is no prefix cache."""
        keys = prompt.first.keys
        if not prompt.is_open and not self._limits.finds_prefixes and keys is not None:
            for pool in (self._pool, self._snapshots):
                pool.forget(pool.holding(keys.from_index(0)))

    # ------------------------------------------------------------ the state

    def allocate_state(self, request: Request, found: int) -> int:
        """Return the state slot of a beginning row; while it computes a shared prompt, a snapshot numbered behind the
        slots.

        found: blocks that the row begins with.
        """
        prompt = request.shared_prompt
        if prompt is not None and prompt.first is request and prompt.is_open and found < prompt.blocks:
            if not self._snapshots.ends_at_boundary(prompt.blocks - 1) and self._snapshots.available:
                (request.prompt_state,) = self._snapshots.allocate(1)
                return self._max_rows - 1 + request.prompt_state  # behind the slots, from 1 on
        return self._state_slots.allocate()

    def cut(self, start: int, request: Request) -> int:
        """Return the end of the request's chunk that begins at `start`."""
        end = min(self._limits.cut(start), request.tokens.size)
        boundary = self._boundary(request)
        return min(end, boundary) if start < boundary else end

    def is_at_state(self, request: Request, start: int) -> bool:
        """Return whether the row has computed the shared prompt, up to `start`, with its state in a snapshot."""
        return start == self._boundary(request)

    def leave_state(self, request: Request) -> None:
        """Give the row a state slot. The next launch copies the state there, so the row's record must be sent again."""
        request.begins_as, request.state_slot = request.prompt_state, self._state_slots.allocate()
        # The record clears the row's entries of the block table. Passed boundaries are in the cache by now.
        request.snapshots = array("i", [NO_SNAPSHOT] * len(request.snapshots))

    def _boundary(self, request: Request) -> int:
        """Return the length of the shared prompt, in tokens, while the request's state is in a snapshot; else -1."""
        prompt = request.shared_prompt
        return -1 if prompt is None or request.prompt_state == NO_SNAPSHOT else prompt.blocks * self._pool.block_size
