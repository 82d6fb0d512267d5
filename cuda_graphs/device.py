"""The interface between the engine and the device that runs its launches.

Implementations: CUDA, host (a worker thread with a FIFO) and, in tests, simulated (work runs by a schedule). A
`Program` is what a launch computes; the device decides when and where it runs.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import RingMemory

NEVER: Final = 1 << 62  # a mark that no launch reaches


class Form(enum.StrEnum):
    """The sampler form that a launch's sample rows need."""

    PLAIN = "plain"  # greedy and temperature
    FULL = "full"  # filters, penalties, bias, allowed tokens, masked stop ids, log-probabilities


class LaunchShape(NamedTuple):
    """The host's description of one launch, S(number) -> apply(number) -> F(number).

    number: the launch's number in the chain, without gaps, in 64 bits. The first is 1, except in tests. sample_rows:
    rows that S(number) reads, all rows of plan number - 1 (0: nothing to sample). form: of those sample rows. rows:
    rows of F(number); 0 makes the launch a closing one, S and copy-out alone. tokens: query tokens of F(number), as if
    each decoding row had `drafts`. is_decode: every row of F(number) has the query tokens of a decoding row, 1 +
    drafts; not in a closing launch. prompt_logprobs: a chunk of F leaves log-probabilities of its prompt. False: the
    launch does no work for them. drafts: drafts of each decoding row in F(number); 0 without any. sample_drafts: the
    same in F(number - 1), whose logits S(number) samples, leaving 1 + sample_drafts cells a row. masked: S(number), in
    the full form, reads masks of rows with a grammar. forced: none of `drafts`, which are above 0, is a guess: only
    grammars may force them.
    """

    number: int
    sample_rows: int
    form: Form
    rows: int
    tokens: int
    is_decode: bool
    prompt_logprobs: bool = False
    drafts: int = 0
    sample_drafts: int = 0
    masked: bool = False
    forced: bool = False

    @property
    def is_closing(self) -> bool:
        return self.rows == 0


class DeviceError(RuntimeError):
    """A launch failed on the device. The engine stops; every request ends once."""


class Program(Protocol):
    """The three parts of a launch, in the device's memory.

    The device calls them in launch order: sample, apply, forward. A program counts launches: every `sample` advances
    its counter, which selects the running launch and its ring slot. A captured graph could not contain the number.
    """

    def sample(self, shape: LaunchShape) -> None:
        """Run S: advance the launch counter, and write a token of each sample row into the cells of the result slot."""

    def apply(self, shape: LaunchShape) -> int:
        """Apply the plan in its staging slot to the row state. Returns the bytes read from the rings (0 if only the
        device can know)."""

    def forward(self, shape: LaunchShape) -> None:
        """Run F: forward over the plan's rows; logits stay on the device, by row slot."""

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        """Return the device's row state by field name, on the host. Only while nothing is in flight; valid until the
        next launch."""


@dataclass(slots=True)
class DeviceCounters:
    """What a device did. Read by `Stats` and by tests."""

    bytes_to_device: int = 0
    waits: int = 0  # times the host blocked on a mark alone
    graph_captures: int = 0
    graph_replays: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)  # launches that were not one graph, by reason


class Device(Protocol):
    """A FIFO of launches with three marks each, in order: sampled (its tokens are readable), in its tail (the host has
    just enough time to enqueue another one; with a short launch, once it is sampled) and ended (its F is done)."""

    rings: RingMemory
    counters: DeviceCounters
    buckets: tuple[int, ...]  # row counts of captured graphs, ascending; empty without graphs
    mixed_buckets: tuple[int, ...]  # query tokens of captured mixed launches, as above
    calls_at_once: int  # most calls of launches that have not ended; one more might wait for the device

    def calls(self, shape: LaunchShape) -> int:
        """Return the most calls that enqueue a launch of this shape: 1 for a graph."""

    def launch(self, shape: LaunchShape) -> None:
        """Enqueue a launch whose plan is staged. Never blocks."""

    def sampled(self) -> int:
        """Return the newest launch whose results are readable. Raises DeviceError if the device failed."""

    def ended(self) -> int:
        """Return the newest launch whose F has ended, which nothing on the device reads any more. With several ranks
        it is the least of their marks, and resources are released by it alone. With one rank it is at most one launch
        behind `sampled`, if that is called first. Raises DeviceError if the device failed."""

    def in_tail(self) -> int:
        """Return the newest launch that is in its tail on every rank. Raises DeviceError if the device failed."""

    def wait(self, sampled: int, ended: int, wake_fds: Sequence[int], timeout_s: float, in_tail: int = NEVER) -> None:
        """Block until `sampled()` > sampled and the launch before has ended, or `ended()` > ended, or `in_tail()` >
        in_tail, or a descriptor is readable, or the time is up. The engine's thread blocks nowhere else meanwhile."""

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        """Return `Program.read_rows` after everything enqueued has ended."""

    def close(self) -> None:
        """Stop after everything enqueued has run or failed."""
