"""The process of a rank other than the first: `python -m runahead.runtime.process.rank`, started by rank 0's.

The first line of standard input is JSON, `RankOrders`. It ends when standard input does, and by a signal when its
parent does: rank 0 is the engine's process. Signals of a terminal are the supervisor's.
Exit codes: 0 when it was told to stop, 1 if a launch failed, 2 if it could not start.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
import torch

from runahead.cuda_graphs.device import DeviceError
from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.log_output import LogOutput, log_to_stderr
from runahead.runtime.log_stream import end_log
from runahead.runtime.parent_death import signal_at_parents_death
from runahead.runtime.process.cpu import delays, host_program
from runahead.runtime.process.cpu_ranks import load_rank
from runahead.runtime.process.pool_fit import is_out_of_memory
from runahead.runtime.process.rank_messages import BlocksMade, BlocksOffered, CannotStart, RankLoaded, RankOrders
from runahead.runtime.programs.cpu.program import HostProgram
from runahead.runtime.ranks.rank_loop import follow_launches
from runahead.runtime.ranks.segment import map_memory
from runahead.runtime.wire.engine_config import ConfigError

EXIT_BROKEN: Final = 1
EXIT_CANNOT_START: Final = 2
_SMALLER: Final = (9, 10)  # the pool that a rank makes over the one that it has no memory for

Say = Callable[[msgspec.Struct], None]
Hear = Callable[[type[Any]], Any]


Follow = Callable[[RankOrders, memoryview, Say, Hear, Callable[[], None]], None]
Message = TypeVar("Message")


def follow(orders: RankOrders, memory: memoryview, say: Say, hear: Hear, began: Callable[[], None]) -> None:
    """Load the rank's part, agree with rank 0 on its pool, and follow launches until the segment says stop. began:
    called before the first launch.

    Raises ConfigError, CheckpointError, DeviceError.
    """
    parts = load_rank(orders, memory, host_program)
    say(RankLoaded(parts.differs))
    program, made = _within_memory(parts.program_with, hear(BlocksOffered).blocks)
    say(BlocksMade(made))
    final = hear(BlocksOffered)
    if final.blocks != made:
        program = parts.program_with(final.blocks)
    say(BlocksMade(final.blocks))
    gc.collect()
    gc.freeze()  # what was made so far lives as long as the process
    device = parts.device(orders, program, delays(orders.config, orders.rank))
    began()
    try:
        follow_launches(device, parts.segment, orders.rank, orders.config.counters_from)
    finally:
        parts.segment.abort()  # what waits for other ranks stops
        device.close()


def _within_memory(program_with: Callable[[int], HostProgram], blocks: int) -> tuple[HostProgram, int]:
    """A program with so many KV blocks, or with fewer where memory runs out."""
    while True:
        try:
            return program_with(blocks), blocks
        except Exception as error:
            if not is_out_of_memory(error) or blocks < 2:
                raise
        given, part = _SMALLER
        blocks = blocks * given // part


def main() -> int:
    """Follow rank 0 until it says stop or is gone. Returns the exit code."""
    signal_at_parents_death()  # also of a process that is stopped
    for number in (signal.SIGINT, signal.SIGTERM):  # also of a group of processes: the supervisor decides
        signal.signal(number, signal.SIG_IGN)
    log_to_stderr(LogOutput())
    has_begun = threading.Event()

    def begin() -> None:
        has_begun.set()
        _end_with_input()

    try:
        orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankOrders)
        if os.getppid() != orders.parent:  # it ended before its end could be signaled
            raise ConfigError("rank 0 has ended before its ranks began")
        torch.set_num_threads(orders.threads)
        memory = map_memory(orders.descriptor, orders.layout)
        _follower(orders)(orders, memory, _say, _hear, begin)
    except (ConfigError, CheckpointError, msgspec.MsgspecError, OSError, ValueError) as error:
        print(error, file=sys.stderr, flush=True)
        _say_why_not(error)
        return EXIT_CANNOT_START
    except DeviceError:
        traceback.print_exc()
        return EXIT_BROKEN
    except RuntimeError as error:  # of a GPU, or of what torch asks of it
        traceback.print_exc()
        if has_begun.is_set():
            return EXIT_BROKEN
        _say_why_not(error)
        return EXIT_CANNOT_START
    return 0


def _follower(orders: RankOrders) -> Follow:
    if orders.config.device == "cpu":
        return follow
    from runahead.runtime.process.cuda_follow import follow as follow_on_gpu  # it loads Triton

    return follow_on_gpu


def _say(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _say_why_not(error: Exception) -> None:
    with contextlib.suppress(OSError):  # rank 0 may have ended
        _say(CannotStart(str(error)))


def _hear(kind: type[Message]) -> Message:
    line = sys.stdin.buffer.readline()
    if not line:
        raise ConfigError(f"rank 0 has ended before it said {kind.__name__}")
    return msgspec.json.decode(line, type=kind)


def _end_with_input() -> None:
    """From now on this process ends when its standard input does: nothing is left for it to do."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    exit_code = main()
    end_log()
    os._exit(exit_code)  # a launch that waits for other ranks would keep an orderly exit from ending
