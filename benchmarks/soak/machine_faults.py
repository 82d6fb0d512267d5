"""Faults of the machine under a service: no log reader, a full TMPDIR, stopped processes, a frozen machine.

One at a time, and none while a front end is killed. Calls go on meanwhile, and each has to end as if nothing were.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import grpc

from benchmarks.soak.growth import of_session
from benchmarks.soak.world import PATIENCE_S, World, completion, now_s
from runahead.v1 import GenerationServiceStub, Structure

BETWEEN_S: Final = 6.0  # from the end of one to the beginning of the next
STOPPED_S: Final = 1.5  # less than an upload may take
FROZEN_S: Final = 20.0
UNREAD_S: Final = 5.0
FULL_S: Final = 5.0
TMPDIR_BYTES: Final = 64 << 20
_LOOK_S: Final = 0.1


class ServiceLog:
    """What a service writes its log to: a FIFO, which a thread copies to a file, or which nobody reads."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "log"
        self._is_read, self._is_left, self._is_over = threading.Event(), threading.Event(), threading.Event()
        self._is_read.set()
        os.mkfifo(self._path)

    def open(self, log: Path) -> IO[bytes]:
        """The end that the service has. log: the file that is copied to."""
        reader = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        threading.Thread(target=self._copy, args=(reader, log), daemon=True).start()
        return self._path.open("wb", buffering=0)

    def leave(self) -> None:
        """Stop reading; writers get an error."""
        self._is_left.clear()
        self._is_read.clear()
        self._is_left.wait()

    def come_back(self) -> None:
        """It is read again."""
        self._is_read.set()

    def close(self) -> None:
        """The service has ended."""
        self._is_over.set()
        self._is_read.set()

    def _copy(self, reader: int, log: Path) -> None:
        with log.open("ab", buffering=0) as out:
            while not self._is_over.is_set():
                if not self._is_read.is_set():
                    os.close(reader)
                    self._is_left.set()
                    self._is_read.wait()
                    reader = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
                select.select([reader], [], [], _LOOK_S)
                with contextlib.suppress(BlockingIOError):
                    if not out.write(os.read(reader, 1 << 16)):
                        self._is_over.wait(_LOOK_S)  # no process has the other end, for now
            os.close(reader)


@contextlib.contextmanager
def small_tmpdir(folder: Path) -> Iterator[Path | None]:
    """A file system of TMPDIR_BYTES; None where this user may not mount one."""
    folder.mkdir()
    options = f"size={TMPDIR_BYTES}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False, capture_output=True)
    try:
        yield folder if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", folder], check=False)


@dataclass(slots=True)
class Machine:
    """The machine that faults are injected into. leader: the service's first process. tmpdir: of the service; None: it
    is not filled. engine: the engine's process id; 0: not known yet."""

    world: World
    leader: int
    log: ServiceLog
    tmpdir: Path | None
    engine: int = 0
    _turn: int = 0

    async def log_unread(self) -> None:
        """The reader of the log goes away and comes back."""
        await asyncio.to_thread(self.log.leave)
        try:
            await self.world.pause(UNREAD_S)
        finally:
            self.log.come_back()
        self.world.happened("the log's reader was gone")

    async def tmpdir_full(self) -> None:
        """Nothing more fits into TMPDIR. A structure is asked for meanwhile."""
        if self.tmpdir is None:
            return
        filler = self.tmpdir / "filler"
        try:
            await asyncio.to_thread(_fill, filler)
            await self.ask_for_a_structure("a structure while TMPDIR was full")
            await self.world.pause(FULL_S)
        finally:
            filler.unlink(missing_ok=True)
        self.world.happened("TMPDIR was full")

    async def one_stopped(self) -> None:
        """The next of the service's processes stands still for a while."""
        running = sorted(of_session(self.leader))
        pid = running[self._turn % len(running)]
        self._turn += 1
        await self._stopped([pid], STOPPED_S)
        self.world.happened("a process was stopped")

    async def all_frozen(self) -> None:
        """All processes stand still, as in a machine that is suspended."""
        await self._stopped(sorted(of_session(self.leader)), FROZEN_S)
        self.world.happened("everything was frozen")

    async def _stopped(self, pids: Sequence[int], seconds: float) -> None:
        begun_s, world = now_s(), self.world
        lists = [world.standstills_s, *([world.engine_stops_s] if list(pids) == [self.engine] else [])]
        for stops_s in lists:
            stops_s.append((begun_s, begun_s + seconds))
        try:
            _send(pids, signal.SIGSTOP)
            await asyncio.sleep(seconds)
        finally:
            _send(pids, signal.SIGCONT)
            stop_s = begun_s, now_s()
            for stops_s in lists:
                stops_s[-1] = stop_s

    async def ask_for_a_structure(self, name: str) -> None:
        """Make a call, counted by this name. It is answered, or refused because something that it needs is missing."""
        channel, stub = self.world.connect()
        request = completion(8)
        request.stopping.ignore_eos = False
        request.structure.CopyFrom(Structure(regex=f"[a-z]{{4}}{self._turn}"))
        began_s, failed = now_s(), None
        try:
            await _last(stub, request, self.world)
        except grpc.RpcError as error:
            failed = error
        codes = (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        self.world.expect(name, began_s, failed, codes)
        await channel.close()
        self.world.channels.remove(channel)


async def _last(stub: GenerationServiceStub, request: object, world: World) -> None:
    call = stub.Generate(request, timeout=PATIENCE_S, metadata=world.metadata("steady"))
    while await call.read() is not grpc.aio.EOF:
        pass


def _fill(filler: Path) -> None:
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:  # ENOSPC is the aim
        while True:
            file.write(bytes(1 << 12))


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


MACHINE_WANTED: Final = ("the log's reader was gone", "a process was stopped", "everything was frozen")


async def keep_disturbing(machine: Machine, until_s: float) -> None:
    """One fault after the other, as long as there is time for the next before `until_s`."""
    stop: Callable[[], Awaitable[None]] = machine.one_stopped
    unread, full = (machine.log_unread, UNREAD_S), (machine.tmpdir_full, FULL_S)
    once = (stop, STOPPED_S)
    faults = (once, once, unread, once, once, full, once, (machine.all_frozen, FROZEN_S))
    number = 0
    while await machine.world.pause(BETWEEN_S):
        fault, takes_s = faults[number % len(faults)]
        number += 1
        if now_s() + takes_s < until_s:
            async with machine.world.machine:
                await fault()
