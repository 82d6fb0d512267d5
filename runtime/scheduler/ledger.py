"""The ledger: which launches exist, how far each has come, and which resources wait for them.

    STAGED -> LAUNCHED -> SAMPLED -> COMMITTED -> RETIRED

A launch's state follows from its number and four marks that only grow, so nothing about launches in flight is stored
twice. With run_ahead=2, while the device runs F of launch 13:

    launch         12         13            14          15          16
    on the device  over       F runs        queued      queued      not planned
    its state      RETIRED    COMMITTED     LAUNCHED    LAUNCHED
                      ^           ^                        ^
                 ended = 12   committed = 13          launched = 15

Two launches are uncommitted, so launch 16 must wait for the tokens of launch 14, and for its tail, in which the host
has just enough time: a later plan includes later arrivals. Everything that a launch may still use is released through
one fence, `defer` and `due`: a block that launches 13, 14 and 15 name is deferred to launch 15, and due when that
launch is committed and ended.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import LaunchShape
from runahead.runtime.scheduler.outcomes import PromptLogprobRange


class LedgerError(RuntimeError):
    """The chain's rules were broken, which is a bug. The engine stops."""


NO_SLOTS = np.zeros(0, np.int32)
NO_EPOCHS = np.zeros(0, np.int64)
_NO_FLAGS = np.zeros(0, np.bool_)


class Launch(NamedTuple):
    """One launch as it was planned.

    sample_slots, sample_epochs, samples: the rows that its S reads (of the previous plan), their epochs in that
    plan, and which of them are sampled. row_slots, row_epochs, row_samples: the same for its F and the next launch's S.
    crossed_slots, crossed_epochs: rows that were given a block because they cross a block boundary with this launch.
    prompt_logprob_ranges: the log-probabilities of prompts that it leaves. guesses, sample_guesses: guessed drafts of
    each decoding row in its F, and in the F before. prompt_tokens: query tokens of its prompt chunks. overlapped: its
    predecessor had not ended when it was enqueued. first: the loop was idle before it. calls: device calls that enqueue
    it, at most.
    """

    shape: LaunchShape
    sample_slots: NDArray[np.int32]
    sample_epochs: NDArray[np.int64]
    samples: NDArray[np.bool_]
    row_slots: NDArray[np.int32]
    row_epochs: NDArray[np.int64]
    row_samples: NDArray[np.bool_]
    crossed_slots: NDArray[np.int32] = NO_SLOTS
    crossed_epochs: NDArray[np.int64] = NO_EPOCHS
    prompt_logprob_ranges: tuple[PromptLogprobRange, ...] = ()
    guesses: int = 0
    sample_guesses: int = 0
    prompt_tokens: int = 0
    overlapped: bool = False
    first: bool = False
    calls: int = 1

    @property
    def number(self) -> int:
        return self.shape.number

    @property
    def leaves_samples(self) -> bool:
        """Return whether its F leaves logits that a next launch must sample."""
        return bool(np.count_nonzero(self.row_samples))


Resource = TypeVar("Resource")


class Ledger(Generic[Resource]):
    """Launches in order, and resources behind the fence.

    run_ahead: how many launches may be queued whose tokens the host has not committed; 0 is serial: a launch is
    enqueued when the previous one has retired. run_ahead_tokens: bound on the prompt tokens of a launch queued behind
    uncommitted ones, together with theirs. launched: the number before the first launch's.
    """

    def __init__(self, run_ahead: int, run_ahead_tokens: int, launched: int = 0) -> None:
        self.run_ahead = run_ahead
        self.run_ahead_tokens = run_ahead_tokens
        # Numbers of the newest launch that has reached each mark.
        self.launched = self.committed = self.tail = self.ended = launched
        self.deferred_total = 0
        self._launches: deque[Launch] = deque()  # not retired, oldest first
        self._last: Launch | None = None
        self._fence: list[tuple[int, int, Resource]] = []  # heap by the launch that must retire

    # ------------------------------------------------------------ what is in flight

    @property
    def retired(self) -> int:
        """The newest launch whose tokens are committed and whose F has ended."""
        return self.committed if self.committed < self.ended else self.ended

    @property
    def uncommitted(self) -> int:
        return self.launched - self.committed

    @property
    def uncommitted_prompt_tokens(self) -> int:
        """Prompt tokens in launches whose tokens the host has not committed."""
        return sum(launch.prompt_tokens for launch in self._launches if launch.number > self.committed)

    @property
    def in_flight(self) -> int:
        """Number of launches that have not retired."""
        return self.launched - self.retired

    @property
    def owes_a_launch(self) -> bool:
        """Return whether the last launch left logits that no enqueued launch samples."""
        return self._last is not None and self._last.leaves_samples

    @property
    def has_room(self) -> bool:
        """Return whether another launch may be planned: the launch run_ahead before it is committed and in its tail."""
        before = self.launched + 1 - self.run_ahead
        return self.in_flight == 0 if self.run_ahead == 0 else self.committed >= before and self.tail >= before

    def has_room_for(self, prompt_tokens: int) -> bool:
        """Return whether a launch with these prompt tokens may be queued behind the uncommitted ones."""
        return not prompt_tokens or prompt_tokens <= self.prompt_room

    def has_room_for_calls(self, calls: int, at_once: int) -> bool:
        """Return whether these calls may be enqueued on a device that takes at_once of them. Behind a single launch
        they always may."""
        before = [launch.calls for launch in self._launches if launch.number > self.ended]
        return len(before) < 2 or sum(before) + calls <= at_once

    @property
    def prompt_room(self) -> int:
        """Prompt tokens that a launch may have if it is queued now."""
        return self.run_ahead_tokens - self.uncommitted_prompt_tokens if self.uncommitted else sys.maxsize

    @property
    def awaited(self) -> tuple[int, int, int]:
        """The oldest outstanding mark, as launches beyond which to wait: sampled, ended, tail. Serial: only ended."""
        never = sys.maxsize
        if self.run_ahead and self.tail < self.committed:
            return never, never, self.tail
        return (self.committed, never, never) if self.run_ahead and self.uncommitted else (never, self.ended, never)

    def launches(self) -> Iterator[Launch]:
        """Yield the launches that have not retired, oldest first."""
        return iter(self._launches)

    # ------------------------------------------------------------ the chain

    def last_rows(self) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
        """Return slots, epochs and sample flags of the last launch's F: the device's row list, sampled by the next
        S."""
        if self._last is None:
            return NO_SLOTS, NO_EPOCHS, _NO_FLAGS
        return self._last.row_slots, self._last.row_epochs, self._last.row_samples

    @property
    def last_drafts(self) -> int:
        """Drafts of each decoding row in the last launch's F."""
        return 0 if self._last is None else self._last.shape.drafts

    @property
    def last_guesses(self) -> int:
        """Guessed drafts of each decoding row in the last launch's F."""
        return 0 if self._last is None else self._last.guesses

    def enqueue(self, launch: Launch) -> None:
        """Record a launch that was given to the device. Raises LedgerError if it is not the next one."""
        number = launch.number
        if number != self.launched + 1:
            raise LedgerError(f"launch {number} was enqueued after launch {self.launched}")
        self.launched = number
        self._launches.append(launch)
        self._last = launch

    def next_to_commit(self) -> Launch:
        """Return the oldest launch whose tokens are not committed. Raises LedgerError if there is none."""
        for launch in self._launches:
            if launch.number == self.committed + 1:
                return launch
        raise LedgerError("there is no launch to commit")

    def commit(self, number: int) -> None:
        """Record that the launch's tokens are in the host's state. Raises LedgerError if it is out of order."""
        if number != self.committed + 1 or number > self.launched:
            raise LedgerError(f"launch {number} was committed after {self.committed} of {self.launched}")
        self.committed = number

    def end(self, number: int, in_tail: int = 0) -> None:
        """Record that F of this launch and of all earlier ones has ended, and which launch is in its tail. Raises
        LedgerError if a mark goes back or too far."""
        if not self.ended <= number <= max(number, in_tail) <= self.launched:
            raise LedgerError(f"the marks went from {self.ended} to {number}, tail {in_tail}, of {self.launched}")
        self.ended, self.tail = number, max(self.tail, number, in_tail)

    def retire(self) -> list[Launch]:
        """Return the launches that have retired since the last call, in order."""
        gone: list[Launch] = []
        retired = self.retired
        while self._launches and self._launches[0].shape.number <= retired:
            gone.append(self._launches.popleft())
        return gone

    # ------------------------------------------------------------ the fence

    def defer(self, number: int, resource: Resource) -> None:
        """Put `resource` behind the fence until launch `number`, the last that names it, has retired. Raises
        LedgerError for a launch beyond the next one."""
        if number > self.launched + 1:
            raise LedgerError(f"a resource waits for launch {number}, {self.launched} were made")
        self.deferred_total += 1
        heapq.heappush(self._fence, (number, self.deferred_total, resource))

    @property
    def fenced(self) -> int:
        """Number of resources behind the fence."""
        return len(self._fence)

    def due(self) -> list[Resource]:
        """Return the resources whose launch has retired, each exactly once."""
        free: list[Resource] = []
        while self._fence and self._fence[0][0] <= self.retired:
            free.append(heapq.heappop(self._fence)[2])
        return free
