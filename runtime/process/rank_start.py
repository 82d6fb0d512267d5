"""How rank 0's process starts the other ranks of a model, on any device, and agrees with them on what they make."""

from __future__ import annotations

import contextlib
import os
import platform
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Device
from runahead.cuda_graphs.rings import Allocate, RingLayout, RingMemory, zeros
from runahead.runtime.process_end import described
from runahead.runtime.ranks.exchange import ONE_RANK, Ranks
from runahead.runtime.ranks.ranked_device import RankedDevice
from runahead.runtime.ranks.segment import START_LIMIT_S, Segment, SegmentLayout, make_memory
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig

# -P: nothing in the current directory can stand in for a module.
COMMAND: Final = (sys.executable, "-P", "-m", "runahead.runtime.process.rank")
_END_S: Final = 2.0  # that a rank has to end in order, before it is killed

Message = TypeVar("Message")

_ORDERED: Final = ("x86_64", "AMD64")  # processors on which stores are seen in their order
_LOOK_S: Final = 0.2  # between two looks whether a rank still runs, during the start


class RankOrders(msgspec.Struct, frozen=True, kw_only=True):
    """Orders of a rank: everything that rank 0 has found out. rank: its number. descriptor: of the segment's memory, in
    the rank's process. parent: the process of rank 0. config: with every size in it. context: tokens of a request, at
    most. threads: of torch. products: how products are computed on CPUs, by name.
    gpus: of each rank, by number; empty on CPUs. forced: drafts of a row with a grammar, on GPUs; None: no row has
    one."""

    layout: SegmentLayout
    config: EngineConfig
    context: int
    parent: int
    rank: int = 0
    descriptor: int = -1
    threads: int = 1
    products: str = ""
    gpus: tuple[int, ...] = ()
    forced: int | None = None


class Mailbox(msgspec.Struct, frozen=True):
    """A rank's mailbox in its GPU's memory. handle: opens it on other ranks' GPUs, in hexadecimal digits."""

    handle: str


class Mailboxes(msgspec.Struct, frozen=True):
    """The mailboxes of all ranks. handles: in rank order."""

    handles: tuple[str, ...]


class Captured(msgspec.Struct, frozen=True):
    """The rank's device is there. digest: of its graphs' keys, and of the exchanges within all launches so far; empty
    on CPUs."""

    digest: str


class CannotStart(msgspec.Struct, frozen=True):
    """The rank ends. reason: a sentence. It replaces any other message of a start."""

    reason: str


class RankLoaded(msgspec.Struct, frozen=True):
    """The rank has its weights."""


class BlocksOffered(msgspec.Struct, frozen=True):
    """An offer of a number of KV blocks; the second one is final. snapshots: of recurrent states beside them."""

    blocks: int
    snapshots: int


class BlocksMade(msgspec.Struct, frozen=True):
    """The answer to the first offer. blocks: that the rank has memory for, at most those offered."""

    blocks: int


@dataclass(frozen=True, slots=True)
class _Process:
    rank: int
    process: subprocess.Popen[bytes]

    def say(self, message: msgspec.Struct) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(message) + b"\n")
            self.process.stdin.flush()
        except OSError:
            self._raise_reason(self._line())
            raise self._ended() from None

    def hear(self, kind: type[Message]) -> Message:
        if not (line := self._line()):
            raise self._ended()
        self._raise_reason(line)
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"rank {self.rank} wrote {line[:80]!r} to its standard output and not {kind.__name__}: no library may "
                "print there"
            ) from error

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def _raise_reason(self, line: bytes) -> None:
        with contextlib.suppress(msgspec.DecodeError):  # no other message has a reason
            reason = msgspec.json.decode(line, type=CannotStart).reason
            raise ConfigError(f"rank {self.rank} could not start: {reason}")

    def _ended(self) -> ConfigError:
        code = self.process.wait()
        return ConfigError(f"rank {self.rank} could not start ({described(code)}); the reason is in its log above")


class RankProcesses:
    """`Followers` that are processes, one for each of `orders`. Each inherits the segment's descriptor, and ends when
    its standard input does. The log of all goes to this process's standard error. limit_s: how long a start waits for
    any of them to say something.

    Raises OSError where a process can't be made.
    """

    def __init__(
        self, orders: Sequence[RankOrders], command: Sequence[str] = COMMAND, limit_s: float = START_LIMIT_S
    ) -> None:
        self._processes: list[_Process] = []
        self._limit_s = limit_s
        try:
            for each in orders:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(each.descriptor,)
                )
                self._processes.append(_Process(each.rank, process))
            for begun, each in zip(self._processes, orders, strict=True):
                begun.say(each)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """In rank order, from rank 1 on."""
        return tuple(each.process.pid for each in self._processes)

    def loaded(self) -> None:
        """Wait until every rank has its weights. Raises ConfigError where one has ended."""
        for _ in self._heard(RankLoaded):
            pass

    def offer(self, blocks: int, snapshots: int) -> int:
        """Agree on a number of KV blocks, at most `blocks`, beside so many snapshots of states. Returns the least that
        any rank has memory for, which the others make now. Raises ConfigError where one has ended."""
        self._say(BlocksOffered(blocks, snapshots))
        least = min(blocks, *(answer.blocks for _, answer in self._heard(BlocksMade)))
        self._say(BlocksOffered(least, snapshots))
        return least

    def mailboxes(self, own: str) -> tuple[str, ...]:
        """The handles of all ranks, which every rank then has. own: of rank 0. Raises ConfigError where one has
        ended."""
        found = dict(self._heard(Mailbox))
        handles = (own, *(found[each.rank].handle for each in self._processes))
        self._say(Mailboxes(handles))
        return handles

    def captured(self, digest: str) -> None:
        """Wait until every rank has its device. digest: `Captured.digest` of rank 0. Raises ConfigError where one has
        ended, or has captured other graphs."""
        for rank, answer in self._heard(Captured):
            if answer.digest != digest:
                raise ConfigError(
                    f"rank {rank} has captured other graphs than rank 0, or other exchanges within them: all ranks "
                    "must run the same program with the same libraries"
                )

    def _say(self, message: msgspec.Struct) -> None:
        for each in self._processes:
            each.say(message)

    def _heard(self, kind: type[Message]) -> Iterator[tuple[int, Message]]:
        """What each rank says next, as they come: one that has ended is noticed while others still work. Raises
        ConfigError where one has ended, or says nothing."""
        with selectors.DefaultSelector() as selector:
            for each in self._processes:
                assert each.process.stdout is not None
                selector.register(each.process.stdout, selectors.EVENT_READ, each)
            for _ in self._processes:
                ready = selector.select(self._limit_s)
                if not ready:
                    late = min(key.data.rank for key in selector.get_map().values())
                    raise ConfigError(
                        f"rank {late} could not start within {self._limit_s:g} s: it is stopped, or its files or its "
                        "GPU do not answer"
                    )
                key, _ = ready[0]
                selector.unregister(key.fileobj)
                yield key.data.rank, key.data.hear(kind)

    def sentinels(self) -> Sequence[int]:
        """See `Followers.sentinels`: a rank says nothing more on its standard output, whose end is the process's."""
        return [each.process.stdout.fileno() for each in self._processes if each.process.stdout is not None]

    def lost(self) -> str:
        """See `Followers.lost`."""
        ended = [(each.rank, code) for each in self._processes if (code := each.process.poll()) is not None]
        # Ranks that were ordered to stop end with 0.
        for rank, code in sorted(ended, key=lambda one: one[1] == 0):
            return f"rank {rank} has ended ({described(code)})"
        return ""

    def close(self) -> None:
        """End all of them: their standard input ends, and who does not follow is killed."""
        for each in self._processes:
            assert each.process.stdin is not None
            with contextlib.suppress(OSError):
                each.process.stdin.close()
        deadline = time.monotonic() + _END_S
        for each in self._processes:
            try:
                each.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
        for each in self._processes:
            assert each.process.stdout is not None
            each.process.stdout.close()


@dataclass(frozen=True, slots=True)
class OtherRanks:
    """The other ranks' processes, and the memory shared with them. memory: the segment's mapping in this process."""

    segment: Segment
    memory: memoryview
    processes: RankProcesses

    def close(self) -> None:
        """End the other ranks."""
        self.segment.abort()
        self.processes.close()


class StartedRanks:
    """What rank 0's process has beside its own part: nothing, where there is one rank alone.

    exchange: of rank 0. allocate: makes the memory of its results.
    """

    def __init__(
        self, exchange: Ranks = ONE_RANK, others: OtherRanks | None = None, allocate: Allocate = zeros
    ) -> None:
        self.exchange = exchange
        self._others, self._allocate = others, allocate
        self._started = threading.Event()
        if others is not None:
            threading.Thread(target=self._watch, args=(others,), name="ranks-watch", daemon=True).start()

    @property
    def marks(self) -> NDArray[np.int64] | None:
        """Rank 0's marks, [2]; None where there is one rank."""
        return None if self._others is None else self._others.segment.marks(0)

    def rings(self, layout: RingLayout, of_one: Callable[[RingLayout], RingMemory]) -> RingMemory:
        """Rank 0's rings. of_one: makes them where there is one rank."""
        return of_one(layout) if self._others is None else self._others.segment.rings(0, self._allocate)

    def loaded(self) -> None:
        """Wait until every rank has its weights. Raises ConfigError."""
        if self._others is not None:
            self._others.processes.loaded()

    def least(self, blocks: int, snapshots: int) -> int:
        """Return the number of KV blocks that every rank has room for, and let all ranks make them. blocks: for which
        rank 0 has room. snapshots: of states, which need room too. Raises ConfigError."""
        return blocks if self._others is None else self._others.processes.offer(blocks, snapshots)

    def device(self, own: Device, digest: str, launched: int) -> Device:
        """The engine's device, once every rank has its own. digest: as `Captured` has it. Raises ConfigError."""
        if self._others is None:
            return own
        self._others.processes.captured(digest)
        self._started.set()
        return RankedDevice(own, self._others.segment, self._others.processes, launched)

    def stop(self) -> None:
        """From now on no rank waits for another one, nor follows launches."""
        if self._others is not None:
            self._others.segment.abort()

    def close(self) -> None:
        """End the other ranks."""
        self._started.set()
        if self._others is not None:
            self._others.close()

    def _watch(self, others: OtherRanks) -> None:
        """During the start: where a rank has ended, this one no longer waits for it in an exchange."""
        while not self._started.wait(_LOOK_S):
            if others.processes.lost():
                others.segment.abort()
                return


def start_processes(orders: RankOrders) -> OtherRanks:
    """Make the segment and start the processes of the other ranks. orders: of all ranks, without what differs. Raises
    ConfigError where ranks can't run on this machine."""
    config, layout = orders.config, orders.layout
    setting = f"{config.spelling('tensor_parallel')} {layout.ranks}"
    if platform.machine() not in _ORDERED or not hasattr(os, "memfd_create"):
        raise ConfigError(f"{setting} needs Linux on an x86-64 processor, on which ranks see stores in their order")
    try:
        descriptor, memory = make_memory(layout)
    except OSError as error:
        raise ConfigError(f"{setting}: there is no memory for the ranks' segment: {error.strerror}") from error
    try:
        segment = Segment(layout, memory, config.counters_from)
        segment.begin()
        orders = msgspec.structs.replace(orders, descriptor=descriptor)
        processes = RankProcesses([msgspec.structs.replace(orders, rank=rank) for rank in range(1, layout.ranks)])
    finally:
        os.close(descriptor)
    return OtherRanks(segment, memory, processes)
