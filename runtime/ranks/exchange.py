"""What ranks on CPUs exchange within a launch, through the segment.

An exchange is a *step*: each rank writes its part into its buffer of the step's slot, then a tag, then the step's
number. A rank that needs the parts waits for these numbers, compares the tags, and reads the parts in rank order. Slots
rotate. A rank writes into a slot only when every peer has begun the step after the one that was read there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.ranks import ONE_RANK, Ranks, RanksError, Shard, fold
from runahead.runtime.ranks.segment import EXCHANGE_SLOTS, FAULT, FAULT_PEER, STEP, WAITED, Segment, pause_after

__all__ = ["ONE_RANK", "HostRanks", "Ranks", "RanksError"]

_REDUCE, _GATHER, _SPREAD, _COLLECT = 1, 2, 3, 4
_CALLS: Final = {_REDUCE: "reduce", _GATHER: "gather", _SPREAD: "spread", _COLLECT: "collect"}
_PAUSES: Final = ((150, 20e-6), (math.inf, 500e-6))  # see `pause_after`

_LONGEST_PAUSE_S: Final = 0.05  # that one sleep counts for, however long this process stood still


class HostRanks:
    """`Ranks` of one rank of a segment.

    limit_s: how long to wait for a peer, counted while this process runs: a machine that stands still is no fault.
    sleep: takes seconds.
    """

    def __init__(
        self, segment: Segment, rank: int, limit_s: float, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.shard = Shard(rank, segment.layout.ranks)
        self._segment = segment
        self._limit_s = limit_s
        self._sleep = sleep
        self._steps = segment.views.words[:, STEP]
        self._own = segment.views.words[rank]
        self._step = 0

    def reduce(self, partial: torch.Tensor) -> None:
        """See `Ranks.reduce`."""
        flat = _flat(partial.numpy())
        for piece in self._pieces(flat, 1):
            slot = self._write(_REDUCE, piece)
            parts = self._read(_REDUCE, slot, piece.size, every=True)
            fold([part[: piece.size] for part in parts], piece)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """See `Ranks.gather`."""
        (count, width), of, is_first = part.shape, self.shard.of, self.shard.is_first
        whole = np.empty((count, of * width if is_first else 0), np.float32)
        begin = 0
        for piece in self._pieces(_flat(part.numpy()), width):
            slot = self._write(_GATHER, piece)
            rows = slice(begin, begin + piece.size // width)
            begin = rows.stop
            if is_first:
                parts = self._read(_GATHER, slot, piece.size, every=True)
                by_rank = whole[rows].reshape(rows.stop - rows.start, of, width)
                for rank, found in enumerate(parts):
                    by_rank[:, rank] = found[: piece.size].reshape(-1, width)
        return torch.from_numpy(whole)

    def collect(self, words: NDArray[np.int32]) -> NDArray[np.int32]:
        """See `VocabRanks.collect`."""
        flat, begin = _flat(words).view(np.float32), 0
        found = np.empty((self._steps.size, flat.size), np.float32)
        for piece in self._pieces(flat, 1):
            slot = self._write(_COLLECT, piece)
            found[:, begin : begin + piece.size] = self._read(_COLLECT, slot, piece.size, every=True)[:, : piece.size]
            begin += piece.size
        return found.view(np.int32).reshape(self._steps.size, *words.shape)

    def spread(self, words: NDArray[np.int32]) -> None:
        """See `Ranks.spread`."""
        for piece in self._pieces(_flat(words).view(np.float32), 1):
            slot = self._write(_SPREAD, piece if self.shard.is_first else None, piece.size)
            if not self.shard.is_first:
                piece[:] = self._read(_SPREAD, slot, piece.size, every=False)[0][: piece.size]

    def _pieces(self, flat: NDArray[np.float32], width: int) -> Iterator[NDArray[np.float32]]:
        """Yield pieces of whole rows that fit a buffer. width: numbers of a row."""
        most = max(1, self._segment.layout.numbers // width) * width
        for begin in range(0, flat.size, most):
            yield flat[begin : begin + most]

    def _write(self, call: int, part: NDArray[np.float32] | None, size: int = 0) -> int:
        """Begin a step, with this rank's part of it if it has one. Returns the step's slot."""
        self._step += 1
        self._wait_for(self._step + 1 - EXCHANGE_SLOTS, call, self._steps)
        views, slot, rank = self._segment.views, self._step % EXCHANGE_SLOTS, self.shard.rank
        if part is not None:
            size = part.size
            views.parts[slot, rank, :size] = part
        views.tags[slot, rank, 0] = _tag(call, size)
        self._own[STEP] = self._step
        return slot

    def _read(self, call: int, slot: int, size: int, *, every: bool) -> NDArray[np.float32]:
        """The parts of every rank, or of the first alone, in rank order, once they are there."""
        count = self.shard.of if every else 1
        self._wait_for(self._step, call, self._steps[:count])
        views, expected = self._segment.views, _tag(call, size)
        for rank, tag in enumerate(views.tags[slot, :count, 0].tolist()):
            if tag != expected:
                raise RanksError(
                    f"rank {rank} is at another exchange than rank {self.shard.rank}: step {self._step} is "
                    f"{_named(tag)} there and {_named(expected)} here"
                )
        return views.parts[slot, :count]

    def _wait_for(self, step: int, call: int, steps: NDArray[np.int64]) -> None:
        """Until these ranks have written that step."""
        tries, waited = 0, 0.0
        begun = 0
        while int(steps.min()) < step:
            if self._segment.aborted:
                raise RanksError(f"rank {self.shard.rank} was stopped in step {self._step}")
            tries += 1
            if not (pause := pause_after(tries, _PAUSES)):
                continue
            begun = begun or time.monotonic_ns()
            before = time.monotonic()
            self._sleep(pause)
            waited += min(time.monotonic() - before, _LONGEST_PAUSE_S)
            if waited > self._limit_s:
                late = int(steps.argmin())
                self._own[FAULT_PEER] = late
                self._own[FAULT] = self._step
                raise RanksError(
                    f"rank {self.shard.rank} has waited {self._limit_s:g} s for rank {late} in step {self._step} "
                    f"({_CALLS[call]})"
                )
        if begun:
            self._own[WAITED] += time.monotonic_ns() - begun


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    """A view of all its numbers in one line."""
    assert array.flags.c_contiguous, "what ranks exchange is contiguous"
    return array.reshape(-1)


def _tag(call: int, size: int) -> int:
    return call << 48 | size


def _named(tag: int) -> str:
    return f"{_CALLS.get(tag >> 48, 'nothing')} of {tag & (1 << 48) - 1} numbers"
