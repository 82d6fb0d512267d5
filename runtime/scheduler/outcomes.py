"""Results of launches: deferred releases, commits, endings, and log-probabilities of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.memory.block_pool import NO_SLOT
from runahead.runtime.scheduler.request import Request
from runahead.runtime.wire.parameters import FinishReason

NOT_A_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Release:
    """What a row gives up, to be released behind the fence.

    With its last F: its blocks, its state slot, and snapshots that it has not reached. With the next S: its row slot
    and its penalty slot. With its first F: the snapshot that its state begins as.
    """

    row_slot: int = NO_SLOT
    blocks: Sequence[int] = ()
    penalty_slot: int = NO_SLOT
    state_slot: int = NO_SLOT
    snapshots: Sequence[int] = ()


# Blocks that a launch has filled: when it has retired, they may join the prefix cache. By block: its request, the row's
# slot, the block's index in the row's block table, and the snapshot of the row's state behind it.
Filled = dict[int, tuple[Request, int, int, int]]


@dataclass(frozen=True, slots=True)
class Eviction:
    """A leaving row, to be settled when its tokens in flight are committed: then its request waits again.

    epoch: the row's when it began to leave; if it differs, the request has ended since.
    """

    request: Request
    row_slot: int
    epoch: int


Deferred = Release | Filled | Eviction


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a request. stop_token_id: the id that ended it, or NOT_A_TOKEN."""

    request: Request
    reason: FinishReason
    stop_token_id: int = NOT_A_TOKEN


class Commit(NamedTuple):
    """A committed launch: columns over its kept tokens, and the requests that it ended."""

    launch: int
    cells: NDArray[np.intp]  # [n] index among the launch's result cells, row by row, 1 + K each
    slots: NDArray[np.int32]  # [n]
    tokens: NDArray[np.int32]  # [n]
    owners: NDArray[np.int64]  # [n]
    handles: NDArray[np.int64]  # [n]
    firsts: NDArray[np.bool_]  # [n] the token is the first of its request
    endings: tuple[Ending, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobRange:
    """Query tokens of a chunk for which the launch leaves log-probabilities.

    start: position of the first one. first_entry: its index among the launch's query tokens. count: entries; entry i is
    about the prompt token at start + 1 + i.
    """

    request: Request
    epoch: int
    row_slot: int
    start: int
    first_entry: int
    count: int
