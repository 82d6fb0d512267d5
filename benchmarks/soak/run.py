"""The soak itself: ordinary callers, the canary, all faults, and what the processes take meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from benchmarks.load.calls import completed
from benchmarks.load.cases import asked, calm_answers, cases
from benchmarks.soak.call_faults import FAULTS, keep_doing
from benchmarks.soak.growth import Sample, Series, of_session, sample_of
from benchmarks.soak.machine_faults import BETWEEN_S, Machine, keep_disturbing
from benchmarks.soak.raw_faults import RAW_FAULTS, keep_doing_raw
from benchmarks.soak.world import PATIENCE_S, World, completion, now_s
from runahead.v1 import GenerateRequest, GenerationServiceStub, StatsRequest, stats_pb2

FRONT_ENDS = 2
STEADY = 12  # ordinary callers
KILL_EVERY_S = 40.0  # longer than a front end has to serve so as not to be given up
QUIET_S = 60.0
# Of the soak. Growth is measured in the second half, of processes that began before this: buffers, caches and the C
# library's heaps fill up at first.
WARM_UP = 0.25
EVERY_S = 1.0


@dataclass(slots=True)
class Soak:
    """A soak run and its results. before, after: processes without open calls, by name. stats: the last figures.
    slowest_s: of the canary's answers. processes: their number before, including ones that Stats does not name."""

    world: World
    seconds: float
    machine: Machine | None = None
    series: dict[tuple[str, int], Series] = field(default_factory=dict)
    before: dict[str, Sample] = field(default_factory=dict)
    after: dict[str, Sample] = field(default_factory=dict)
    stats: stats_pb2.ServerStats = field(default_factory=stats_pb2.ServerStats)
    canaries: int = 0
    slowest_s: float = 0.0
    begun_s: float = 0.0
    processes: int = 0

    async def run(self) -> None:
        """All of it. What was wrong is in `world.wrong`."""
        world = self.world
        ops, stub = world.connect()
        steady = [world.connect()[1] for _ in range(4)]
        wanted = cases(12)
        answers = await calm_answers(stub, wanted, world.metadata("steady"))
        canary = completion(16, seed=7)
        (song,) = await calm_answers(stub, [canary], world.metadata("canary"))
        if self.machine is not None:
            await self.machine.ask_for_a_structure("a structure before all")  # its processes are there from then on
        await self._wait_quiet(stub)
        self.before = self._samples(self.stats)
        if self.machine is not None:
            self.processes = len(of_session(self.machine.leader))
            self.machine.engine = next(process.pid for process in self.stats.processes if process.name == "engine")
        self.begun_s = now_s()
        tasks = [
            asyncio.create_task(self._watch(stub)),
            asyncio.create_task(self._canary(world.connect()[1], canary, song)),
            asyncio.create_task(self._kill(stub)),
            *(asyncio.create_task(self._ordinary(steady[n % 4], n, wanted, answers)) for n in range(STEADY)),
            *(asyncio.create_task(keep_doing(world, fault, every_s)) for fault, every_s in FAULTS),
            *(asyncio.create_task(keep_doing_raw(world, fault, every_s)) for fault, every_s in RAW_FAULTS),
        ]
        if self.machine is not None:
            tasks.append(asyncio.create_task(keep_disturbing(self.machine, self.begun_s + self.seconds)))
        asyncio.get_running_loop().call_later(self.seconds, world.ended.set)
        await asyncio.gather(*tasks)
        for channel in world.channels:
            if channel is not ops:
                await channel.close()
        await self._wait_quiet(stub)
        self.after = await self._settled(stub)
        await ops.close()

    async def _ordinary(
        self, stub: GenerationServiceStub, number: int, wanted: Sequence[GenerateRequest], answers: Sequence[object]
    ) -> None:
        draws, mine = self.world.draws(f"steady {number}"), self.world.metadata("steady")
        while not self.world.ended.is_set():
            case = draws.randrange(len(wanted))
            request = asked(wanted[case], self.world.new_id())
            call = await completed(stub, request, metadata=mine, patience_s=PATIENCE_S)
            if self.world.judge("an ordinary completion", call, answers[case]):  # type: ignore[arg-type]
                self.world.happened("ordinary completions that ended well")
            elif call.code == grpc.StatusCode.UNAVAILABLE:
                await self.world.pause(0.2)

    async def _canary(self, stub: GenerationServiceStub, canary: GenerateRequest, song: tuple[int, ...]) -> None:
        """The same request each second, whether the last one is answered or not, before all others in the queue."""
        async with asyncio.TaskGroup() as answers:
            while await self.world.pause(EVERY_S):
                answers.create_task(self._sing(stub, canary, song))

    async def _sing(self, stub: GenerationServiceStub, canary: GenerateRequest, song: tuple[int, ...]) -> None:
        request = asked(canary, "")
        request.priority = 1000
        call = await completed(stub, request, metadata=self.world.metadata("canary"), patience_s=PATIENCE_S)
        if self.world.judge("the canary", call, song):
            self.canaries += 1
            self.slowest_s = max(self.slowest_s, call.ended_s - call.began_s)
        elif call.is_refused:
            self.world.wrong.append(f"the canary: refused ({call.reason})")

    async def _watch(self, stub: GenerationServiceStub) -> None:
        """A sample of each process a second."""
        while await self.world.pause(EVERY_S):
            with contextlib.suppress(grpc.RpcError):  # its front end was killed: there is a next second
                await self._ask(stub)
                for process in self.stats.processes:
                    if (sample := sample_of(process.pid, now_s() - self.begun_s)) is not None:
                        key = process.name, process.pid
                        self.series.setdefault(key, Series(*key)).samples.append(sample)

    async def _kill(self, stub: GenerationServiceStub) -> None:
        """Both front ends in turn, and from WARM_UP on the second alone: of the first the growth is measured."""
        after_s, number = min(KILL_EVERY_S, self.seconds / 4), 0
        while await self.world.pause(after_s):
            after_s, number = KILL_EVERY_S, number + 1
            is_early = now_s() - self.begun_s < self.seconds * WARM_UP - 10.0
            name = f"front_end_{1 + number % FRONT_ENDS}" if is_early else "front_end_2"
            async with self.world.machine:
                pids = [process.pid for process in self.stats.processes if process.name == name]
                for pid in pids:
                    self.world.killed_s.append(now_s())
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        self.world.happened("front ends killed")
                await self.world.pause(BETWEEN_S)

    async def _ask(self, stub: GenerationServiceStub) -> None:
        self.stats = (await stub.Stats(StatsRequest(), timeout=20.0, metadata=self.world.metadata("ops"))).stats

    async def _wait_quiet(self, stub: GenerationServiceStub) -> None:
        """Nothing is open, and nothing is held of what was."""
        deadline, held = now_s() + QUIET_S, ["no answer"]
        while held and now_s() < deadline:
            with contextlib.suppress(grpc.RpcError):
                await self._ask(stub)
                held = still_held(self.stats)
            await asyncio.sleep(0.2)
        if held:
            self.world.wrong.append(f"{QUIET_S:.0f} s after the last call, still held: {', '.join(held)}")

    async def _settled(self, stub: GenerationServiceStub) -> dict[str, Sample]:
        """The processes, when they have let go of their connections, or when they should have."""
        deadline = time.monotonic() + QUIET_S
        while True:
            with contextlib.suppress(grpc.RpcError):
                await self._ask(stub)
            found = self._samples(self.stats)
            if time.monotonic() > deadline or not leaked_descriptors(self.before, found):
                return found
            await asyncio.sleep(0.5)

    def _samples(self, stats: stats_pb2.ServerStats) -> dict[str, Sample]:
        found = {process.name: sample_of(process.pid, now_s() - self.begun_s) for process in stats.processes}
        return {name: sample for name, sample in found.items() if sample is not None}


SPARE = 4  # descriptors that a process may have more than at first: a connection that is not closed yet, a listener


def leaked_descriptors(before: dict[str, Sample], after: dict[str, Sample]) -> list[str]:
    """Sentences about processes that have gone, or hold more descriptors than they did."""
    found = [f"{name} is gone" for name in sorted(before.keys() - after.keys())]
    for name in sorted(before.keys() & after.keys()):
        if after[name].descriptors > before[name].descriptors + SPARE:
            found.append(f"{name} has {after[name].descriptors} descriptors, and had {before[name].descriptors}")
    return found


def still_held(stats: stats_pb2.ServerStats) -> list[str]:
    """What a service without a request may not hold: names and how many."""
    blocks, rows, slots = stats.blocks, stats.rows, stats.penalty_slots
    counts = {
        "blocks owned": blocks.owned,
        "blocks fenced": blocks.fenced,
        "blocks lost": blocks.total - blocks.free - blocks.cached - blocks.owned - blocks.fenced,
        "row slots": rows.total - rows.free,
        "penalty slots": slots.total - slots.free,
        "requests running": stats.requests.running,
        "requests waiting": stats.requests.waiting,
        "open streams": stats.front_end.open_streams,
        "queued tokens": stats.held.queued_tokens,
        "bytes being tokenized": stats.held.tokenizing_bytes,
        # The call that asks has been read whole.
        "uploads": stats.held.uploads,
        "front ends missing": FRONT_ENDS - stats.front_end.front_ends,
    }
    return [f"{count} {name}" for name, count in counts.items() if count]
