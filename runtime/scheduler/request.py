"""Requests as the scheduler serves them, what each holds, and what completions of one prompt share.

The first of several completions computes their prompt, and the others share the KV blocks that it fills. The others
join the queue when these blocks can be found. A completion that shares them computes the prompt's last tokens again,
since their logits are wanted. It finds the blocks in the prefix cache, and of a model with recurrent states the state
behind them. Where the prefix cache is off, the blocks have a salt that only these completions know, and are forgotten
when each of them has had a row.
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

from runahead.runtime.memory.slot_pool import NO_SLOT
from runahead.runtime.memory.snapshot_pool import NO_SNAPSHOT
from runahead.runtime.wire.block_keys import PrefixKeys
from runahead.runtime.wire.engine_config import MOST_DRAFTS
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams

MAX_EVICTIONS: Final = 3  # a request evicted so often is protected: others of its priority leave before it


class NeverFits(ValueError):
    """The request is larger than the whole pool; `prompt_alone`: so is its prompt without a completion."""

    def __init__(self, sentence: str, prompt_alone: bool) -> None:
        super().__init__(sentence)
        self.prompt_alone = prompt_alone


@dataclass(slots=True, eq=False)
class Request:
    """A request from the queue to its end. Its slots are NO_SLOT while it waits.

    prompt_ids: the prompt's distinct ids, ascending, where a repetition penalty looks at them; else none.
    block_keys: keys of the prompt's full blocks, 32 bytes each, made by the front end; none: they are made when needed.
    blocks: its KV blocks, in order, int32: thousands are copied at once and never looked at one by one.
    tokens: all that is known when it is admitted: its prompt, and after an eviction its completion so far.
    cached_tokens: of its prompt, taken from the prefix cache when it was first admitted.
    shared: of its blocks, the first ones, which it found in the prefix cache.
    registered: of its blocks, those that will be findable once the launches that wrote them have retired.
    snapshots: of its state, int32, at each border that one of its blocks ends at; NO_SNAPSHOT: none is taken there.
    Those behind its registered blocks are its own no more.
    begins_as: the snapshot that its state begins as.
    caller: who asks; empty where nobody is asked. outranks: its priority counts beside other callers' requests, too.
    evictions: how often it gave up its row and its blocks for want of blocks.
    gives_way: its row was told to leave for a caller that has none.
    begun_at: of its tokens, those that its row found in the prefix cache or that a row of it had computed before.
    computed: of its tokens, those that had been through the model when it did so last.
    next_prompt_logprob: place in the prompt of the next token whose log-probability is to be sent.
    last_token_s: when its last token before its last eviction was sent, on the engine's clock. NaN: it had none.
    may_hold: it has a grammar, and its masks may come late: a launch may bring no token of it.
    drafted, accepted: drafts of its rows that launches have looked at, and those that were right, by their place in a
    run, int64 [MOST_DRAFTS], once it has no row.
    generated: tokens of its completion, likewise.
    shared_prompt: what it has in common with other completions of its prompt; None: it is the only one.
    prompt_state: the snapshot in which its state is while it computes a shared prompt.
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
        """It ends at the context's length, before its own max_tokens."""
        return self.max_len < self.prompt.size + self.stopping.max_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Log-probabilities of its prompt were asked for, and not all of them are sent."""
        return self.sampling.prompt_logprobs >= 0 and self.next_prompt_logprob < self.prompt.size

    @property
    def is_protected(self) -> bool:
        """It was evicted as often as any request may be, unless for one of a higher priority."""
        return self.evictions >= MAX_EVICTIONS

    @property
    def precedence(self) -> int:
        """Its priority beside requests of other callers."""
        return self.priority if self.outranks else 0

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Among its caller's: higher priority first, of equals those that are protected, then first come first served.

        It changes with an eviction alone, while the request is in no queue.
        """
        return -self.priority, not self.is_protected, self.order


_SEEDS = 1 << 64


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """blocks: full blocks of the prompt that are shared. is_ready: they can be found, or the first completion has
    ended. not_begun: completions that have not had a row and have not ended."""

    first: Request
    blocks: int
    is_ready: bool = False
    not_begun: set[Request] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        """A completion may still look for the blocks."""
        return bool(self.not_begun)

    def holds_back(self, request: Request) -> bool:
        """The request is not to be admitted yet."""
        return request is not self.first and not self.is_ready

    def found(self, request: Request, blocks: int) -> bool:
        """So many blocks of this completion, its first ones, can be found. Whether the prompt is ready by that."""
        return self._is_ready_by(request is self.first and blocks >= self.blocks)

    def has_ended(self, request: Request) -> bool:
        """A completion has ended. Nobody waits for one that is gone. Whether the prompt is ready by that."""
        self.not_begun.discard(request)
        return self._is_ready_by(request is self.first)

    def _is_ready_by(self, event: bool) -> bool:
        before, self.is_ready = self.is_ready, self.is_ready or event
        return self.is_ready and not before


def share(requests: Sequence[Request], blocks: int) -> None:
    """These completions of one prompt share its first blocks."""
    prompt = SharedPrompt(requests[0], blocks, not_begun=set(requests))
    for request in requests:
        request.shared_prompt = prompt


def sampling_of(sampling: SamplingParams, index: int) -> SamplingParams:
    """Of completion `index`, where completion 0 has `sampling`: another seed, and nothing is said of the prompt."""
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) % _SEEDS, prompt_logprobs=-1)
