"""`Ranks` on GPUs: each rank's mailbox in its own GPU's memory, which all peers write into.

Everything is enqueued on the current stream. Nothing waits for the host, so exchanges are captured like other kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.ranks import Shard
from runahead.runtime.kernels.triton.ranks.push_exchange import CAPACITY, push_reduce, push_reduce_add
from runahead.runtime.kernels.triton.ranks.push_rows import ROW_WORDS, WORDS, push_best, push_gather, push_spread
from runahead.runtime.kernels.triton.ranks.waits import (
    CHANNELS,
    CONTROL_WORDS,
    LIMIT_NS,
    SLOTS,
    WAITED_NS,
    Counters,
    Mailboxes,
    WaitWords,
)
from runahead.runtime.ranks.peer_memory import CudaRuntime, PeerPointer, tensor_at
from runahead.runtime.ranks.segment import START_LIMIT_S
from runahead.runtime.rounding import ceil_div

MOST_WIDTH: Final = CAPACITY  # of a hidden state
GATHER_BYTES: Final = 64 << 20  # of logits that the first rank takes in one step, at most
_EMPTY: Final = -32768  # the bits of -0.0 in bfloat16
_LINE: Final = 256  # bytes to which each part of a mailbox is aligned

# By name: the dtype of a part of a mailbox and how many numbers it has, of so many ranks and of the first rank.
_PARTS: Final[dict[str, tuple[torch.dtype, Callable[[int, bool], int]]]] = {
    "parts": (torch.int16, lambda ranks, first: CHANNELS * SLOTS * ranks * CAPACITY),
    "words": (torch.int64, lambda ranks, first: SLOTS * WORDS),
    "bests": (torch.int64, lambda ranks, first: CHANNELS * SLOTS * ranks * ROW_WORDS),
    "gather_flags": (torch.int32, lambda ranks, first: ranks * CHANNELS),
    "spread_flags": (torch.int32, lambda ranks, first: ranks),
    "whole": (torch.float32, lambda ranks, first: GATHER_BYTES // 4 if first else 0),
}


def _offsets(ranks: int, first: bool) -> tuple[dict[str, int], int]:
    """Where each part of a mailbox begins, and how many bytes it has in all."""
    offsets, size = {}, 0
    for name, (dtype, count) in _PARTS.items():
        offsets[name] = size
        size += ceil_div(count(ranks, first) * dtype.itemsize, _LINE) * _LINE
    return offsets, size


class Mailbox:
    """This rank's, in memory of the current GPU, empty. handle: by which peers open it."""

    def __init__(self, rank: int, ranks: int, runtime: CudaRuntime) -> None:
        self.shard = shard = Shard(rank, ranks)
        self._runtime = runtime
        offsets, size = _offsets(shard.of, shard.is_first)
        self._address = runtime.allocate(size)
        self.handle = runtime.handle(self._address)
        self.size = size
        for name, (dtype, count) in _PARTS.items():
            number = count(shard.of, shard.is_first)
            if number:
                self._own(name, dtype, number, offsets).fill_(_EMPTY if name == "parts" else 0)
        torch.cuda.synchronize()  # before any peer knows of it

    def _own(self, name: str, dtype: torch.dtype, count: int, offsets: dict[str, int]) -> torch.Tensor:
        device = torch.device("cuda", torch.cuda.current_device())
        return tensor_at(self._address + offsets[name], (count,), dtype, device)

    def joined(self, handles: Sequence[bytes]) -> Mailboxes:
        """All ranks' mailboxes. handles: by rank."""
        ranks = self.shard.of
        bases = [
            self._address if rank == self.shard.rank else self._runtime.open(handle)
            for rank, handle in enumerate(handles)
        ]
        found: dict[str, Any] = {
            name: tuple(
                PeerPointer(dtype, base + _offsets(ranks, not rank)[0][name]) for rank, base in enumerate(bases)
            )
            for name, (dtype, _) in _PARTS.items()
        }
        found["whole"] = found["whole"][0]
        if self.shard.is_first:
            found["whole"] = self._own("whole", torch.float32, GATHER_BYTES // 4, _offsets(ranks, True)[0])
        return Mailboxes(**found)


def make_counters(
    device: torch.device, abort: NDArray[np.int64], fault: NDArray[np.int64], waited: NDArray[np.int64]
) -> Counters:
    """Make zeroed counters. abort, fault, waited: host words that the device can reach; see `Counters`."""
    return Counters(
        reduces=torch.zeros(CHANNELS, dtype=torch.int32, device=device),
        gathers=torch.zeros(CHANNELS, dtype=torch.int32, device=device),
        bests=torch.zeros(CHANNELS, dtype=torch.int32, device=device),
        spreads=torch.zeros(1, dtype=torch.int32, device=device),
        wait_words=WaitWords(
            control=torch.zeros(CONTROL_WORDS, dtype=torch.int64, device=device),
            abort=torch.from_numpy(abort),
            fault=torch.from_numpy(fault),
        ),
        waited=torch.from_numpy(waited),
    )


class GpuRanks:
    """The exchange as one rank's GPU has it. Until `limit` is called, a wait may take START_LIMIT_S."""

    def __init__(self, shard: Shard, boxes: Mailboxes, counters: Counters, gather_numbers: int = GATHER_BYTES // 4):
        self.shard = shard
        self._boxes, self._counters, self._gather_numbers = boxes, counters, gather_numbers
        self._noted = sha256()
        self.limit(START_LIMIT_S)

    @property
    def digest(self) -> str:
        """The digest of all exchanges enqueued or captured so far, in order. It is the same on every rank."""
        return self._noted.hexdigest()

    def _note(self, call: str, size: int) -> None:
        self._noted.update(f"{call} {size};".encode())

    def limit(self, seconds: float) -> None:
        """No wait for a peer lasts longer, from now on. Waits are counted anew. Only while no exchange is under way."""
        self._counters.wait_words.control[LIMIT_NS] = int(seconds * 1e9)
        self._counters.wait_words.control[WAITED_NS] = 0
        self._counters.waited.zero_()

    def reduce(self, partial: torch.Tensor) -> None:
        """See `Ranks.reduce`. bfloat16."""
        self._note("reduce", partial.numel())
        push_reduce(partial, self.shard.rank, self._boxes, self._counters)

    def reduce_add(
        self,
        partial: torch.Tensor,
        residual: torch.Tensor,
        following: torch.Tensor,
        scaled: torch.Tensor,
        squares: torch.Tensor,
    ) -> int:
        """See `DeviceRanks.reduce_add`."""
        self._note("reduce", partial.numel())
        return push_reduce_add(
            partial, residual, following, scaled, squares, self.shard.rank, self._boxes, self._counters
        )

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """See `Ranks.gather`."""
        return self.gather_rows(part, None)

    def gather_rows(self, part: torch.Tensor, indexes: torch.Tensor | None) -> torch.Tensor:
        """See `DeviceRanks.gather_rows`."""
        rows = part.shape[0] if indexes is None else indexes.shape[0]
        whole_width = len(self._boxes.parts) * part.shape[1]
        most = self._gather_numbers // whole_width
        found = part.new_empty((rows, whole_width)) if rows > most and self.shard.is_first else None
        for begin in range(0, rows, most):
            there, count = slice(begin, begin + most), min(rows - begin, most)
            self._note("gather", count * part.shape[1])
            own, taken = (part[there], None) if indexes is None else (part, indexes[there])
            push_gather(own, taken, self.shard.rank, self._boxes, self._counters)
            if self.shard.is_first:
                whole: torch.Tensor = self._boxes.whole[: count * whole_width].view(-1, whole_width)
                if found is None:
                    return whole
                found[there] = whole
        return part.new_empty((rows, 0)) if found is None else found

    def best(self, scores: torch.Tensor, tokens: torch.Tensor, rows: int) -> None:
        """See `DeviceRanks.best`."""
        self._note("best", rows)
        push_best(scores, tokens, rows, self.shard.rank, self._boxes, self._counters)

    def spread(self, words: torch.Tensor) -> None:
        """See `Ranks.spread`. A tensor on the device."""
        self._note("spread", words.numel())
        push_spread(words, self.shard.rank, self._boxes, self._counters)
