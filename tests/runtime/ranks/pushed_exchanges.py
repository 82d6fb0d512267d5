"""Ranks of exchanges by the kernels of GPUs, in Triton's interpreter: each a process, forked from one that has imported
what they need.

`python -m tests.runtime.ranks.pushed_exchanges RANKS FILE ROUNDS FROM`, with TRITON_INTERPRET=1. The mailboxes of all
ranks are in FILE, which every rank maps. Sums of FROM numbers or more are shared. Prints the JSON of `Outcome` of every
rank, in rank order.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from runahead.runtime.kernels.ranks import Shard
from tests.runtime.kernels.triton_device import triton_device

triton_device()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from runahead.runtime.kernels.layers import Norm  # noqa: E402
from runahead.runtime.kernels.triton.gemm.separate_epilogue import add_scaled  # noqa: E402
from runahead.runtime.kernels.triton.ranks import push_exchange, push_rows, waits  # noqa: E402
from runahead.runtime.kernels.triton.ranks.push_exchange import CAPACITY  # noqa: E402
from runahead.runtime.kernels.triton.ranks.push_rows import ROW_WORDS, WORDS  # noqa: E402
from runahead.runtime.kernels.triton.ranks.waits import (  # noqa: E402
    CHANNELS,
    CONTROL_WORDS,
    LIMIT_NS,
    SLOTS,
    WAITED_NS,
    Counters,
    Mailboxes,
    WaitWords,
)
from runahead.runtime.process_end import signal_at_parents_death  # noqa: E402
from runahead.runtime.ranks.gpu_ranks import GpuRanks  # noqa: E402
from tests.runtime.ranks.best_of_parts import bests  # noqa: E402

EMPTY: Final = -32768
WHOLE: Final = 1 << 16
LIMIT_S: Final = 60.0
LATE_S: Final = 1.0
SIZES: Final = (16, 5136, 1)  # numbers of the reductions of a round: of several channels, and of one
FEW_CHANNELS: Final = 2  # so that each has tiles of several ranks where they share, and several steps elsewhere
STEP: Final = 512  # numbers of a channel's step, then


class Outcome(msgspec.Struct):
    """sums, gathered, spread: digests of what the rank was left with, of each kind of exchange; the first of what it
    should be. fault: the step at which it gave up, and the peer that it waited for. reduce_wait_s: of the
    reductions of the round that the last rank begins late. wait_s: of all exchanges, on the device and for the host.
    """

    sums: tuple[str, str]
    gathered: tuple[str, str]
    spread: tuple[str, str]
    fault: tuple[int, int]
    reduce_wait_s: float
    wait_s: tuple[float, float]


def partial(rank: int, ranks: int, step: int, size: int) -> torch.Tensor:
    """A rank's partial of a step: every step has others. Some are -0.0. In some indexes the order of the sum shows. All
    sums are bfloat16 numbers: the interpreter cuts off what a GPU rounds."""
    drawn = torch.randint(-40, 40, (size,), generator=torch.Generator().manual_seed(1000 * step + rank)).bfloat16()
    drawn[:: 7 + rank] = -0.0
    if rank in (0, ranks - 1):
        drawn[3::5] = 2.0**24 if rank == 0 else -(2.0**24)
    return drawn


def whole_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float32, in rank order, -0.0 counted as +0.0, rounded once."""
    total = parts[0].float() + 0.0
    for part in parts[1:]:
        total = total + part.float()
    return total.bfloat16()


def digest(found: Sequence[torch.Tensor]) -> str:
    hashed = hashlib.sha256()
    for one in found:
        hashed.update(one.contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


class Carver:
    """Tensors one behind the other in one mapping, which is as long as they need."""

    def __init__(self, memory: Any) -> None:
        self._memory, self.used = memory, 0

    def __call__(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        begin = self.used
        self.used += -(-count * dtype.itemsize // 256) * 256
        return (
            torch.empty(0, dtype=dtype)
            if self._memory is None
            else torch.frombuffer(self._memory, dtype=dtype, count=count, offset=begin)
        )


def carved(memory: Any, ranks: int) -> tuple[Mailboxes, torch.Tensor, int]:
    """The mailboxes, a word for each rank that says that it is there, and their bytes."""
    carve = Carver(memory)
    kinds = (
        (CHANNELS * SLOTS * ranks * CAPACITY, torch.int16), (SLOTS * WORDS, torch.int64),
        (CHANNELS * SLOTS * ranks * ROW_WORDS, torch.int64), (ranks * CHANNELS, torch.int32), (ranks, torch.int32),
    )  # fmt: skip
    by_rank = [tuple(carve(*kind) for kind in kinds) for _ in range(ranks)]
    whole, there = carve(WHOLE, torch.float32), carve(ranks, torch.int64)
    parts, words, bests, gather_flags, spread_flags = zip(*by_rank, strict=True)
    return Mailboxes(parts, words, bests, gather_flags, spread_flags, whole), there, carve.used


def play_device() -> None:
    """What the interpreter has not: the device's clock, and stores that the host sees."""

    def device_ns() -> Any:
        return tl.full([], time.monotonic_ns(), tl.int64)

    def store_for_host(pointer: Any, value: Any) -> None:
        tl.store(pointer, value)

    for module in (push_exchange, push_rows, waits):
        module.device_ns = device_ns  # type: ignore[attr-defined]
    waits.store_for_host = store_for_host


def run(rank: int, ranks: int, file: Path, rounds: int) -> Outcome:
    """rounds: if negative, the last rank leaves out the last one of so many."""
    with file.open("r+b") as opened:
        memory = mmap.mmap(opened.fileno(), carved(None, ranks)[2])
    boxes, there, _ = carved(memory, ranks)
    boxes.parts[rank].fill_(EMPTY)
    there[rank] = 1
    while int(there.sum()) < ranks:
        time.sleep(0.001)
    host = np.zeros(4, np.int64)
    counters = Counters(
        torch.zeros(CHANNELS, dtype=torch.int32), torch.zeros(CHANNELS, dtype=torch.int32),
        torch.zeros(CHANNELS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
        WaitWords(
            torch.zeros(CONTROL_WORDS, dtype=torch.int64), torch.from_numpy(host[:1]), torch.from_numpy(host[1:3])
        ),
        torch.from_numpy(host[3:]),
    )  # fmt: skip
    exchange = GpuRanks(Shard(rank, ranks), boxes, counters, WHOLE)
    exchange.limit(LIMIT_S if rounds > 0 else 0.5)
    found, right = ([], [], []), ([], [], [])  # type: ignore[var-annotated]
    step, reduce_wait = 0, 0
    waited = counters.wait_words.control[WAITED_NS]
    for turn in range(abs(rounds)):
        if rank == ranks - 1 and rounds < 0 and turn == abs(rounds) - 1:
            break  # this rank is gone
        if rank == ranks - 1 and turn == 1:
            time.sleep(LATE_S)
        for size in SIZES:
            step += 1
            mine = partial(rank, ranks, step, size)
            before = int(waited)
            exchange.reduce(mine)
            reduce_wait += (int(waited) - before) * (turn == 1)
            found[0].append(mine)
            right[0].append(whole_sum([partial(each, ranks, step, size) for each in range(ranks)]))
        step += 1
        rows, width = 1 + 3 * turn, 80
        mine = partial(rank, ranks, step, rows * width).view(rows, width)
        other = [torch.ones(rows, width, dtype=torch.bfloat16) * step for _ in range(4)]
        gamma = torch.arange(width).bfloat16() * 0.5
        squares = torch.zeros(2, 2, rows, dtype=torch.float64)
        cut = exchange.reduce_add(mine, other[0], gamma, other[1], squares[0])
        assert cut == (2 if 2 * rows <= FEW_CHANNELS else 1), "rows have more channels as long as there are enough"
        squares[0, 0], squares[0, 1] = squares[0].sum(0), 0.0
        whole = whole_sum([partial(each, ranks, step, rows * width) for each in range(ranks)]).view(rows, width)
        add_scaled(whole, None, other[2], Norm(gamma, 0.0), other[3], squares[1])
        found[0].extend([other[0], other[1], squares[0]])
        right[0].extend([other[2], other[3], squares[1]])
        parts = [torch.arange(1040.0).repeat(3 + turn, 1) * (9 * turn + each + 1) for each in range(ranks)]
        found[1].append(exchange.gather(parts[rank]).clone())
        right[1].append(torch.cat(parts, 1) if rank == 0 else parts[0][:, :0])
        indexes = torch.tensor([2, 0, 1][: turn + 1], dtype=torch.int32)
        found[1].append(exchange.gather_rows(parts[rank], indexes).clone())
        right[1].append(torch.cat([part[indexes] for part in parts], 1) if rank == 0 else parts[0][: turn + 1, :0])
        best, expected = bests(step, rank, ranks, 5 + turn)
        exchange.best(best[0], best[1], 5 + turn)
        found[1].extend(best)
        right[1].extend(expected)
        words = torch.arange(4 * (turn + 1), dtype=torch.int32) - turn * 7 + 100_000 * rank
        exchange.spread(words)
        found[2].append(words)
        right[2].append(torch.arange(4 * (turn + 1), dtype=torch.int32) - turn * 7)
    assert int(counters.wait_words.control[LIMIT_NS]) > 0
    sums, gathered, spread = ((digest(one), digest(other)) for one, other in zip(right, found, strict=True))
    return Outcome(
        sums, gathered, spread, (int(host[1]), int(host[2])), reduce_wait / 1e9, (int(waited) / 1e9, int(host[3]) / 1e9)
    )


def forked(ranks: int, file: Path, rounds: int) -> list[Outcome]:
    """Return every rank's outcome, in rank order. A rank that fails ends this process, after the others have ended."""
    pipes = []
    for rank in range(ranks):
        reading, writing = os.pipe()
        if os.fork() == 0:
            signal_at_parents_death()
            outcome = run(rank, ranks, file, rounds)
            os.write(writing, msgspec.json.encode(outcome))  # less than a pipe holds
            os._exit(0)  # an exception ends it otherwise, and is printed
        os.close(writing)
        pipes.append(reading)
    statuses = [os.wait()[1] for _ in range(ranks)]
    if any(statuses):
        sys.exit(f"ranks ended with {statuses}")
    return [msgspec.json.decode(os.read(pipe, 1 << 16), type=Outcome) for pipe in pipes]


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1" and triton is not None
    play_device()
    chosen: dict[str, Any] = {
        "SHARED_NUMBERS": int(sys.argv[4]),
        "CHANNELS": FEW_CHANNELS,
        "_SMALL_BLOCK": 256,
        "LEAST_PART": 20,
    }
    if SIZES[1] < chosen["SHARED_NUMBERS"]:
        chosen |= {"CAPACITY": STEP, "_CAPACITY": tl.constexpr(STEP), "_LARGE_BLOCK": 256}
    for name, value in chosen.items():
        setattr(push_exchange, name, value)
    for name, value in {"CHANNELS": FEW_CHANNELS, "ROW_WORDS": 4, "_ROW_WORDS": tl.constexpr(4)}.items():
        setattr(push_rows, name, value)
    print(msgspec.json.encode(forked(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))).decode())
