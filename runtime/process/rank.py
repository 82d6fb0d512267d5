"""The process of a rank other than the first: `python -m runahead.runtime.process.rank`, started by rank 0's.

The first line of standard input is JSON, `RankOrders`. It ends when standard input does, and by a signal when its
parent does: rank 0 is the engine's process. Signals of a terminal are the supervisor's.
Exit codes: 0 after an order to stop, 1 if a launch failed, 2 if it could not start.
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
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec
import torch

from runahead.cuda_graphs.device import Device, DeviceError
from runahead.runtime.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from runahead.runtime.log_output import LogOutput, end_log, log_to_stderr
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.read_config import load_config
from runahead.runtime.process.cpu import CpuRank
from runahead.runtime.process.rank_start import (
    BlocksMade,
    BlocksOffered,
    CannotStart,
    Captured,
    Mailbox,
    Mailboxes,
    RankLoaded,
    RankOrders,
)
from runahead.runtime.process_end import signal_at_parents_death
from runahead.runtime.ranks.rank_loop import follow_launches
from runahead.runtime.ranks.segment import Segment, map_memory
from runahead.runtime.wire.engine_config import ConfigError

EXIT_BROKEN: Final = 1
EXIT_CANNOT_START: Final = 2

Say = Callable[[msgspec.Struct], None]
Hear = Callable[[type[Any]], Any]
Message = TypeVar("Message")


class RankPart(Protocol):
    """A rank's part of a model on its device."""

    def load(self, checkpoint: Checkpoint, described: ModelConfig) -> None:
        """Load the part's weights. Raises CheckpointError."""

    def begin(self) -> None:
        """Run the launches that rank 0 runs before it offers blocks."""

    def blocks(self, offered: BlocksOffered) -> int:
        """KV blocks that there is memory for: those offered, or fewer."""

    def device(self, agreed: BlocksOffered) -> tuple[Device, str]:
        """The device that follows launches, and `Captured.digest`."""


def follow(orders: RankOrders, memory: memoryview, say: Say, hear: Hear, began: Callable[[], None]) -> None:
    """Load the rank's part, agree with rank 0 on its pool, and follow launches until the segment says stop. memory: the
    segment's. began: called before the first launch.

    Raises ConfigError, CheckpointError, DeviceError, PeerMemoryError.
    """
    config, segment = orders.config, Segment(orders.layout, memory, orders.config.counters_from)
    part = _part(orders, segment, memory, say, hear)
    checkpoint = open_checkpoint(Path(config.model))
    described = load_config(checkpoint)
    part.load(checkpoint, described)
    say(RankLoaded())
    part.begin()
    say(BlocksMade(part.blocks(hear(BlocksOffered))))
    device, captured = part.device(hear(BlocksOffered))
    say(Captured(captured))
    gc.collect()
    gc.freeze()  # what was made so far lives as long as the process
    began()
    try:
        follow_launches(device, segment, orders.rank, config.counters_from)
    finally:
        segment.abort()  # what waits for other ranks stops
        device.close()


def _part(orders: RankOrders, segment: Segment, memory: memoryview, say: Say, hear: Hear) -> RankPart:
    """A part on the configured device. On GPUs, ranks open each other's mailboxes."""
    if orders.config.device == "cpu":
        return CpuRank(orders, segment)
    from runahead.runtime.process.cuda_follow import CudaRank  # it loads Triton

    def handles_of(own: str) -> tuple[str, ...]:
        say(Mailbox(own))
        heard: Mailboxes = hear(Mailboxes)
        return heard.handles

    return CudaRank(orders, segment, memory, handles_of)


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
        follow(orders, memory, _say, _hear, begin)
    except DeviceError:
        traceback.print_exc()
        return EXIT_BROKEN
    except (ConfigError, CheckpointError, msgspec.MsgspecError, OSError, ValueError, RuntimeError) as error:
        if has_begun.is_set():
            traceback.print_exc()
            return EXIT_BROKEN
        if isinstance(error, RuntimeError):  # of a GPU, or of what torch asks of it
            traceback.print_exc()
        print(error, file=sys.stderr, flush=True)
        _say_why_not(error)
        return EXIT_CANNOT_START
    return 0


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
