"""Requests in the scheduler, and prompts that several completions share.

The first of several completions computes their prompt, and the others share its KV blocks. They join the queue when
these blocks can be found. Each computes the prompt's last tokens again, because it needs their logits. It finds the
blocks in the prefix cache, and for a model with recurrent states the state behind them. Without a prefix cache the
blocks have a salt that only these completions know, and are forgotten when each completion has had a row.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from runahead.runtime.memory.prefix_cache import NO_SNAPSHOT
from runahead.runtime.memory.slot_pool import NO_SLOT
from runahead.runtime.wire.block_keys import PrefixKeys
from runahead.runtime.wire.engine_config import MOST_DRAFTS
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams

MAX_EVICTIONS: Final = 3  # a request with so many evictions is protected: others of its priority are evicted first


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

    def holds_back(self, request: Request) -> bool:
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
