"""What comes of launches: what waits behind the fence, what a commit brought, who ended, what prompts are owed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.memory.slot_pool import NO_SLOT
from runahead.runtime.scheduler.request import Request
from runahead.runtime.wire.parameters import FinishReason

NOT_A_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Release:
    """What a row gives back behind the fence.

    With its last F: its blocks, its state slot, and snapshots that it has not reached. With the S after that: its row
    slot and its penalty slot. A snapshot that its state begins as: with its first F.
    """

    row_slot: int = NO_SLOT
    blocks: Sequence[int] = ()
    penalty_slot: int = NO_SLOT
    state_slot: int = NO_SLOT
    snapshots: Sequence[int] = ()


# Blocks whose last token a launch has written: once it has retired, they may join the prefix cache. By block: whose it
# is, the row's slot, the block's place in the row's block table, and the snapshot of the row's state behind it.
Filled = dict[int, tuple[Request, int, int, int]]


@dataclass(frozen=True, slots=True)
class Eviction:
    """The tokens that a leaving row had in flight are committed: its request waits again.

    epoch: of the row when it was told to leave; another one means that the request has ended since.
    """

    request: Request
    row_slot: int
    epoch: int


Deferred = Release | Filled | Eviction


@dataclass(frozen=True, slots=True)
class Ending:
    """A request has ended. stop_token_id: the id that ended it, or NOT_A_TOKEN."""

    request: Request
    reason: FinishReason
    stop_token_id: int = NOT_A_TOKEN


class Commit(NamedTuple):
    """What a launch brought: columns over the tokens that are kept, and the requests that ended with it."""

    launch: int
    cells: NDArray[np.intp]  # [n] of the token among the launch's result cells, row by row, 1 + K of each
    slots: NDArray[np.int32]  # [n]
    tokens: NDArray[np.int32]  # [n]
    owners: NDArray[np.int64]  # [n]
    handles: NDArray[np.int64]  # [n]
    firsts: NDArray[np.bool_]  # [n] the token is the first of its request
    endings: tuple[Ending, ...]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Query tokens of a chunk whose log-probabilities the launch leaves.

    start: position of the first of them. first_entry: its place among the launch's query tokens. count: entries; entry
    i is about the prompt token at start + 1 + i.
    """

    request: Request
    epoch: int
    row_slot: int
    start: int
    first_entry: int
    count: int
