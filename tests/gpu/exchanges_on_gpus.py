"""Exchanges between all GPUs of the machine, a process each, against sums that the CPU makes. `python -m
tests.gpu.exchanges_on_gpus` exits with 0 if all agree to the bit, and prints what does not: sums by every rank, then by
shares. Two ranks share the GPU of a machine with one, and CUDA_VISIBLE_DEVICES chooses fewer. With `times` behind it,
it prints on standard error how long sums take in a graph. With RANK and the segment's descriptor behind that, it is the
process of a rank.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Final

import torch

from runahead.cuda_graphs.rings import RingLayout
from runahead.runtime.kernels.layers import Norm
from runahead.runtime.kernels.triton.gemm.separate_epilogue import add_scaled
from runahead.runtime.kernels.triton.ranks import push_exchange
from runahead.runtime.process.cuda_ranks import joined
from runahead.runtime.ranks.gpu_ranks import GpuRanks
from runahead.runtime.ranks.segment import Segment, SegmentLayout, make_memory, map_memory
from tests.runtime.ranks.best_of_parts import bests

MOST_RANKS: Final = 8
# A power of 2, as most numbers are that models divide.
RANKS: Final = 1 << max(2, min(torch.cuda.device_count(), MOST_RANKS)).bit_length() - 1
LAYOUT: Final = SegmentLayout(RANKS, RingLayout(4, 64, 64, 8, 4), 1)
SIZES: Final = (16, 256, 4096, 4096 * 8, 4096 * 64, 4096 * 256 + 16, 5_000_000)  # the last in two steps
ADDED_ROWS: Final = (1, 8, 300, 1500, 1, 64, 256, 5000)  # the last in more steps than a mailbox has slots
STEPS: Final = 42
REPLAYS: Final = 40
TIMED_BYTES: Final = (8 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20)
_WIDTH: Final = 4096  # numbers of a row that is timed
_TIMED: Final = 66  # sums of a graph that is timed


def partial(rank: int, step: int, size: int) -> torch.Tensor:
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(1000 * step + rank)).bfloat16()
    drawn[:: 7 + rank] = -0.0
    return drawn


def whole(step: int, size: int) -> torch.Tensor:
    return _in_rank_order([partial(rank, step, size) for rank in range(RANKS)])


def _in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in float32, -0.0 counted as +0.0, rounded once."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.bfloat16()


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.equal(one.cpu().view(torch.int16), other.cpu().view(torch.int16))


def gpus() -> tuple[int, ...]:
    """By rank. Ranks share the one GPU of a machine: they take turns, and each exchange waits for a turn."""
    return (0,) * RANKS if torch.cuda.device_count() < RANKS else tuple(range(RANKS))


def _added(exchange: GpuRanks, rank: int, step: int) -> bool:
    """Whether a sum that goes on to the residual differs from the sum and the addition by themselves."""
    device, rows, width = torch.device("cuda", gpus()[rank]), ADDED_ROWS[step % 8], (4096, 2560)[step % 2]
    x = partial(rank, step, rows * width).view(rows, width).to(device)
    gamma = torch.full((width,), 0.7, dtype=torch.bfloat16, device=device)
    drawn = torch.randn(rows, width, generator=torch.Generator().manual_seed(step)).bfloat16().to(device)
    residuals, scaled = (drawn, drawn.clone()), (torch.empty_like(drawn), torch.empty_like(drawn))
    squares = torch.zeros(2, 4, rows, dtype=torch.float64, device=device)
    exchange.reduce_add(x, residuals[0], gamma, scaled[0], squares[0])
    total = whole(step, rows * width).view(rows, width).to(device)
    add_scaled(total, None, residuals[1], Norm(gamma, 0.0), scaled[1], squares[1])
    return differ(*residuals) or differ(*scaled) or not torch.equal(*squares.sum(1))


def run(rank: int, descriptor: int, timed: bool) -> list[str]:
    """Which exchanges differ. timed: print times instead."""
    torch.cuda.set_device(gpus()[rank])
    device = torch.device("cuda", gpus()[rank])
    memory = map_memory(descriptor, LAYOUT)

    def handles_of(own: str) -> tuple[str, ...]:
        print(own, flush=True)
        return tuple(sys.stdin.readline().split())

    exchange = joined(rank, Segment(LAYOUT, memory), memory, handles_of)
    bad: list[str] = []
    for ways, shares in {"by every rank": _never, "by shares": _always}.items():
        push_exchange._is_divided = shares
        if timed:
            _print_times(exchange, rank, device, ways)
        else:
            bad += [f"{ways}: {what}" for what in _differ(exchange, rank, device)]
    return bad


def _always(numbers: int, ranks: int) -> bool:
    return True


def _never(numbers: int, ranks: int) -> bool:
    return False


def _print_times(exchange: GpuRanks, rank: int, device: torch.device, ways: str) -> None:
    """Microseconds of a sum in a graph, and of one that goes on to the residual, by bytes. ways: who sums."""
    gamma = torch.ones(_WIDTH, dtype=torch.bfloat16, device=device)
    for size in TIMED_BYTES:
        x = torch.zeros(size // 2 // _WIDTH, _WIDTH, dtype=torch.bfloat16, device=device)
        residual, scaled = torch.zeros_like(x), torch.zeros_like(x)
        squares = torch.zeros(8, x.shape[0], dtype=torch.float64, device=device)
        alone = _graph_us(lambda x=x: exchange.reduce(x))  # type: ignore[misc]
        added = _graph_us(
            lambda x=x, residual=residual, scaled=scaled, squares=squares: exchange.reduce_add(  # type: ignore[misc]
                x, residual, gamma, scaled, squares
            )
        )
        if rank == 0:
            times = f"sum {alone:.2f} us, onto the residual {added:.2f} us"
            print(f"{RANKS} GPUs, {ways}, {size >> 10} KiB: {times}", file=sys.stderr, flush=True)


def _graph_us(work: Callable[[], object]) -> float:
    """The median of several replays of a graph of many. All ranks do the same."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs are filled there
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(_TIMED):
            work()
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            graph.replay()
            begin.record()
            graph.replay()
            graph.replay()
            end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 2 / _TIMED)
    return statistics.median(times)


def _differ(exchange: GpuRanks, rank: int, device: torch.device) -> list[str]:
    """Which exchanges differ, in a graph too."""
    bad: list[str] = []
    for step in range(STEPS):
        size = SIZES[step % len(SIZES)]
        mine = partial(rank, step, size).to(device)
        exchange.reduce(mine)
        bad += [f"sum of {size} in step {step}"] * differ(mine, whole(step, size))
        rows = 1 + 37 * (step % 8)
        parts = [
            torch.randn(rows, 2048, generator=torch.Generator().manual_seed(RANKS * step + each))
            for each in range(RANKS)
        ]
        got = exchange.gather(parts[rank].to(device)).cpu()
        bad += [f"gather in step {step}"] * (rank == 0 and not torch.equal(got, torch.cat(parts, 1)))
        indexes = torch.arange(rows - 1, -1, -3, dtype=torch.int32)
        got = exchange.gather_rows(parts[rank].to(device), indexes.to(device)).cpu()
        bad += [f"rows in step {step}"] * (rank == 0 and not torch.equal(got, torch.cat(parts, 1)[indexes]))
        best, expected = bests(step, rank, RANKS, rows)
        for _ in range(1 + step % 3):  # several, one right behind the other
            found = [one.to(device) for one in best]
            exchange.best(found[0], found[1], rows)
        bad += [f"best in step {step}"] * (not all(map(torch.equal, expected, (one.cpu() for one in found))))
        words = torch.arange(4 * (step + 1), dtype=torch.int32, device=device) - step + 1000 * rank
        exchange.spread(words)
        right_words = torch.arange(4 * (step + 1), dtype=torch.int32) - step
        bad += [f"words in step {step}"] * (not torch.equal(words.cpu(), right_words))
        bad += [f"onto the residual in step {step}"] * _added(exchange, rank, step)
    # One graph, replayed without a wait, whose inputs change on the device: an odd number of steps in it.
    size = SIZES[3]
    base = [partial(each, STEPS, size).to(device) for each in range(RANKS)]
    turn, sums = torch.zeros(1, dtype=torch.bfloat16, device=device), torch.zeros(size, device=device)
    x = torch.empty_like(base[rank])

    def body() -> None:
        turn.add_(1.0)
        for _ in range(3):
            torch.add(base[rank], turn, out=x)
            exchange.reduce(x)
            sums.add_(x.float())

    _run_and_replay(body)
    right, at = torch.zeros_like(sums), torch.zeros_like(turn)
    for _ in range(1 + REPLAYS):
        at.add_(1.0)
        total = torch.zeros_like(right)
        for each in base:
            total.add_((each + at).float())
        for _ in range(3):
            right.add_(total.bfloat16().float())
    bad += ["sums of a graph"] * (not torch.equal(sums, right))
    return bad + ["a chain in a graph"] * _chain_differs(exchange, rank, device)


def _run_and_replay(work: Callable[[], None]) -> None:
    """Run it once, and REPLAYS times as a captured graph. All ranks do the same."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs are filled there
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()


def _chain_differs(exchange: GpuRanks, rank: int, device: torch.device) -> bool:
    """Whether sums that go on to the residual differ in a replayed graph, the second of what the first has left."""
    rows, width = 64, 4096
    base = [partial(each, STEPS + 1, rows * width).view(rows, width).to(device) for each in range(RANKS)]
    gamma, turn = torch.full((width,), 0.1, dtype=torch.bfloat16, device=device), torch.zeros_like(base[0][:1, :1])
    x, residuals = torch.empty_like(base[0]), (torch.zeros_like(base[0]), torch.zeros_like(base[0]))
    scaled, squares = (
        [torch.empty_like(x) for _ in range(4)],
        torch.zeros(2, 4, rows, dtype=torch.float64, device=device),
    )

    def body() -> None:
        turn.add_(1.0)
        torch.add(base[rank], turn, out=x)
        exchange.reduce_add(x, residuals[0], gamma, scaled[0], squares[0])
        exchange.reduce_add(scaled[0], residuals[0], gamma, scaled[1], squares[0])

    _run_and_replay(body)
    norm, at = Norm(gamma, 0.0), torch.zeros_like(turn)
    for _ in range(1 + REPLAYS):
        at.add_(1.0)
        add_scaled(_in_rank_order([each + at for each in base]), None, residuals[1], norm, scaled[2], squares[1])
        add_scaled(_in_rank_order([scaled[2]] * RANKS), None, residuals[1], norm, scaled[3], squares[1])
    return differ(*residuals) or differ(scaled[1], scaled[3]) or not torch.equal(*squares.sum(1))


def main(timed: bool) -> int:
    descriptor, memory = make_memory(LAYOUT)
    Segment(LAYOUT, memory).begin()
    command = [sys.executable, "-m", "tests.gpu.exchanges_on_gpus", "times" if timed else "bits"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(descriptor,),
        )
        for rank in range(RANKS)
    ]
    try:
        handles = [rank.stdout.readline().strip() for rank in ranks if rank.stdout is not None]
        for rank in ranks:  # all of them, before the first is waited for
            assert rank.stdin is not None
            rank.stdin.write(" ".join(handles) + "\n")
            rank.stdin.flush()
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    print("".join(said))
    return max(abs(rank.returncode) for rank in ranks)


if __name__ == "__main__":
    is_timed = sys.argv[1:2] == ["times"]
    if len(sys.argv) < 3:
        sys.exit(main(is_timed))
    found = run(int(sys.argv[2]), int(sys.argv[3]), is_timed)
    if not is_timed:
        print(f"rank {sys.argv[2]}: {len(found)} exchanges differ", *found, sep="; ")
    sys.stdout.flush()
    os._exit(bool(found))
