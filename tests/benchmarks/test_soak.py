"""What `make soak` takes for wrong and what it excuses, and a short run of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import grpc
import pytest

from benchmarks.load.calls import Call
from benchmarks.soak.__main__ import report
from benchmarks.soak.call_faults import Fault, aborted, cancelled, deadlines, duplicate, invalid, stranger
from benchmarks.soak.growth import MIB, Sample, Series
from benchmarks.soak.machine_faults import FROZEN_S, Machine, ServiceLog
from benchmarks.soak.raw_faults import keep_doing_raw
from benchmarks.soak.run import FRONT_ENDS, SPARE, Soak, leaked_descriptors, still_held
from benchmarks.soak.world import World
from runahead.service.contract.errors import ServiceError, exhausted, to_status
from runahead.service.settings.settings import FrontEndSettings
from runahead.v1 import (
    AbortResponse,
    GenerationServiceStub,
    StatsResponse,
    generate_pb2,
    generation_service_pb2_grpc,
    stats_pb2,
)
from tests.benchmarks.test_soak_growth import samples

TOKENS = (1, 2, 3)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
INVALID = grpc.StatusCode.INVALID_ARGUMENT


class TakesEverything(generation_service_pb2_grpc.GenerationServiceServicer):
    """A service that refuses nothing and nobody, whatever it is sent, and aborts nothing."""

    def Generate(self, request: Any, context: Any) -> Iterator[generate_pb2.GenerateResponse]:
        yield generate_pb2.GenerateResponse(accepted=generate_pb2.Accepted())
        yield generate_pb2.GenerateResponse(finished=generate_pb2.Finished(reason="FINISH_REASON_LENGTH"))

    def Abort(self, request: Any, context: Any) -> AbortResponse:
        return AbortResponse()

    def Stats(self, request: Any, context: Any) -> StatsResponse:
        return StatsResponse()


@pytest.fixture
def world() -> Iterator[World]:
    server = grpc.server(ThreadPoolExecutor(32))
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(TakesEverything(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield World(seed=1, url=f"127.0.0.1:{port}")
    server.stop(None).wait()


def done(world: World, fault: Fault) -> None:
    async def once() -> None:
        channel, stub = world.connect()
        await fault(world, stub, channel)
        await channel.close()

    asyncio.run(once())


async def long_deadlines(world: World, stub: GenerationServiceStub, channel: grpc.aio.Channel) -> None:
    """Long enough for a service on a busy machine to answer first."""
    await deadlines(world, stub, channel, step_s=60.0)


@pytest.mark.parametrize(
    ("fault", "missed"),
    [
        (invalid, "invalid fields: ended with OK, and not with INVALID_ARGUMENT"),
        (stranger, "credentials: none: ended with OK, and not with UNAUTHENTICATED"),
        (duplicate, "an id that is in use: ended with OK, and not with ALREADY_EXISTS"),
        (aborted, "aborted: ended with FINISH_REASON_LENGTH"),
        (long_deadlines, "deadlines that pass: ended with OK, and not with DEADLINE_EXCEEDED"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_service_that_takes_everything_is_wrong_about_each_fault(world: World, fault: Fault, missed: str) -> None:
    done(world, fault)
    assert missed in world.wrong


def test_a_call_that_has_ended_before_it_is_cancelled_was_cancelled_nowhere(world: World) -> None:
    done(world, cancelled)
    assert world.counts["cancelled in the decode"] == 0
    assert world.counts["calls that had ended before they were cancelled"] > 0


@pytest.mark.parametrize("was_killed", [False, True])
def test_a_connection_that_ends_by_itself_is_wrong_unless_a_front_end_was_killed(was_killed: bool) -> None:
    async def soak() -> World:
        world, loop = World(seed=1), asyncio.get_running_loop()

        def meets_the_end(world: World) -> None:
            if was_killed:
                world.killed_s.append(time.monotonic())
            loop.call_soon_threadsafe(world.ended.set)
            raise EOFError("the server has closed the connection")

        await keep_doing_raw(world, meets_the_end, every_s=0.001)
        return world

    world = asyncio.run(soak())
    assert world.counts["calls that ended with their front end"] == was_killed
    assert world.wrong == ([] if was_killed else ["meets_the_end: EOFError the server has closed the connection"])


def test_a_connection_that_meets_a_standstill_is_excused() -> None:
    async def soak() -> World:
        world, loop = World(seed=1), asyncio.get_running_loop()

        def meets_a_standstill(world: World) -> None:
            world.standstills_s.append((time.monotonic(), time.monotonic()))
            loop.call_soon_threadsafe(world.ended.set)
            raise TimeoutError

        await keep_doing_raw(world, meets_a_standstill, every_s=0.001)
        return world

    world = asyncio.run(soak())
    assert world.counts["connections that met a standstill"] == 1 and not world.wrong


def test_a_log_that_is_left_is_told_to_its_writer_and_read_again_later(tmp_path: Path) -> None:
    log, copied = ServiceLog(tmp_path), tmp_path / "copied"
    with log.open(copied) as writer:
        writer.write(b"one\n")
        until(lambda: copied.exists() and copied.read_bytes() == b"one\n")
        log.leave()
        with pytest.raises(BrokenPipeError):
            writer.write(b"two\n")
        log.come_back()
        until(lambda: written(writer, b"three\n"))
        until(lambda: copied.read_bytes().endswith(b"three\n"))
    log.close()
    assert b"two" not in copied.read_bytes()


def written(writer: IO[bytes], line: bytes) -> bool:
    try:
        writer.write(line)
    except BrokenPipeError:  # nobody has opened it again yet
        return False
    return True


def until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30.0
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def test_a_process_that_is_stopped_goes_on_and_is_a_standstill(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    world = World(seed=1)
    machine = Machine(world, process.pid, ServiceLog(tmp_path), None)

    async def stop() -> list[str]:
        stopping = asyncio.create_task(machine.one_stopped())
        states = list[str]()
        while not stopping.done():
            states.append(state_of(process.pid))
            await asyncio.sleep(0.01)
        return states

    assert "T" in asyncio.run(stop())
    process.communicate(b"\n")
    assert process.returncode == 0 and len(world.standstills_s) == 1 and not world.engine_stops_s
    assert world.counts["a process was stopped"] == 1


def test_a_stop_of_the_engine_alone_is_one_in_which_calls_are_refused(tmp_path: Path) -> None:
    world = World(seed=1)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    machine = Machine(world, process.pid, ServiceLog(tmp_path), None, engine=process.pid)
    asyncio.run(machine.one_stopped())
    process.communicate(b"\n")
    assert world.engine_stops_s == world.standstills_s and len(world.engine_stops_s) == 1


def ended(code: grpc.StatusCode, *, began_s: float = 100.0, fault: str = "", reason: str = "") -> Call:
    return Call(began_s, code=code, reason=reason, what="words", accepted_s=began_s, fault=fault)


def test_a_call_that_is_lost_is_wrong_unless_a_front_end_was_killed_about_then() -> None:
    world = World(seed=1)
    assert not world.judge("somebody", ended(UNAVAILABLE), TOKENS)
    assert world.wrong == ["somebody: ended with UNAVAILABLE (): words"]
    world.killed_s.append(98.0)
    assert not world.judge("somebody", ended(UNAVAILABLE), TOKENS)
    assert len(world.wrong) == 1 and world.counts["calls that ended with their front end"] == 1
    for late in (ended(UNAVAILABLE, began_s=104.0), ended(grpc.StatusCode.INTERNAL), ended(UNAVAILABLE, fault="two")):
        assert not world.judge("somebody", late, TOKENS)
    assert len(world.wrong) == 4, "long after it, with another code, or with an end too many it is wrong"


def test_a_call_that_finds_the_engine_silent_is_wrong_unless_the_engine_was_stopped_meanwhile() -> None:
    world = World(seed=1, killed_s=[100.0], standstills_s=[(100.0, 120.0)])
    refused = error(to_status(ServiceError("ENGINE_SILENT", "silent")))
    silent = ended(UNAVAILABLE, reason="ENGINE_SILENT")
    assert not world.judge("somebody", silent, TOKENS)
    world.expect("deadline", 100.0, refused, [grpc.StatusCode.DEADLINE_EXCEEDED])
    assert len(world.wrong) == 2, "neither a front end's end nor a stop of everything makes the engine silent"
    world.engine_stops_s.append((99.0, 100.5))
    assert not world.judge("somebody", silent, TOKENS)
    world.expect("deadline", 101.0, refused, [grpc.StatusCode.DEADLINE_EXCEEDED])
    assert len(world.wrong) == 2 and world.counts == {"calls refused while the engine was stopped": 2}
    world.expect("deadline", 102.0, refused, [grpc.StatusCode.DEADLINE_EXCEEDED])
    assert not world.judge("somebody", ended(UNAVAILABLE, began_s=102.0, reason="ENGINE_SILENT"), TOKENS)
    assert len(world.wrong) == 4, "by then a front end has heard of the engine again"


def test_a_status_after_the_end_is_wrong_unless_a_front_end_was_killed_about_then() -> None:
    world = World(seed=1)
    cut_off = ended(UNAVAILABLE)
    cut_off.tokens, cut_off.is_finished = TOKENS, True
    assert not world.judge("somebody", cut_off, TOKENS)
    assert world.wrong == ["somebody: a status UNAVAILABLE followed the end"]
    world.killed_s.append(100.0)
    assert not world.judge("somebody", cut_off, TOKENS)
    assert len(world.wrong) == 1 and world.counts["calls that ended with their front end"] == 1


def test_other_tokens_are_wrong_whatever_was_killed() -> None:
    world = World(seed=1, killed_s=[100.0])
    whole = Call(100.0, code=grpc.StatusCode.OK, accepted_s=100.0, tokens=TOKENS, is_finished=True)
    assert world.judge("the canary", whole, TOKENS) and not world.wrong
    assert not world.judge("the canary", whole, (1, 2, 4))
    assert world.wrong == ["the canary: its 3 tokens are not the 3 of the calm run"]


def error(status: grpc.Status) -> grpc.RpcError:
    metadata = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), metadata, status.details)


def test_a_fault_is_counted_where_it_ends_as_it_should_and_wrong_where_it_does_not() -> None:
    world = World(seed=1)
    full, stalled = (
        error(to_status(exhausted("STREAMS_LIMIT", "full", 1.0))),
        error(to_status(ServiceError("STALLED_READER", "stalled"))),
    )
    world.expect("well", 100.0, None, [grpc.StatusCode.OK])
    world.expect("full", 100.0, full, [INVALID])
    assert world.counts == {"well": 1, "refused for want of room": 1} and not world.wrong
    world.expect("odd", 100.0, stalled, [INVALID])
    world.expect("odd", 100.0, None, [INVALID])
    assert world.wrong == [
        "odd: ended with RESOURCE_EXHAUSTED: stalled, and not with INVALID_ARGUMENT",
        "odd: ended with OK, and not with INVALID_ARGUMENT",
    ]


def quiet_stats() -> stats_pb2.ServerStats:
    stats = stats_pb2.ServerStats()
    stats.blocks.total, stats.blocks.free, stats.blocks.cached = 149, 100, 49
    stats.rows.total = stats.rows.free = 64
    stats.penalty_slots.total = stats.penalty_slots.free = 16
    stats.front_end.front_ends = FRONT_ENDS
    return stats


@pytest.mark.parametrize(
    ("hold", "names"),
    [
        (lambda stats: setattr(stats.blocks, "free", 99), ["1 blocks lost"]),
        (lambda stats: setattr(stats.blocks, "owned", 2), ["2 blocks owned", "-2 blocks lost"]),
        (lambda stats: setattr(stats.rows, "free", 63), ["1 row slots"]),
        (lambda stats: setattr(stats.penalty_slots, "free", 15), ["1 penalty slots"]),
        (lambda stats: setattr(stats.front_end, "open_streams", 3), ["3 open streams"]),
        (lambda stats: setattr(stats.held, "queued_tokens", 7), ["7 queued tokens"]),
        (lambda stats: setattr(stats.held, "uploads", 1), ["1 uploads"]),
        (lambda stats: setattr(stats.front_end, "front_ends", 1), ["1 front ends missing"]),
    ],
)
def test_what_a_service_without_a_request_still_holds_is_named(
    hold: Callable[[stats_pb2.ServerStats], None], names: list[str]
) -> None:
    stats = quiet_stats()
    assert still_held(stats) == []
    hold(stats)
    assert still_held(stats) == names


def test_descriptors_that_do_not_come_back_and_processes_that_are_gone_are_named() -> None:
    before = {name: Sample(0.0, MIB, 5, 20) for name in ("engine", "front_end_1", "side_server")}
    after = {"engine": Sample(9.0, MIB, 5, 20 + SPARE), "front_end_1": Sample(9.0, MIB, 5, 21 + SPARE)}
    assert leaked_descriptors(before, before) == []
    assert leaked_descriptors(before, after) == ["side_server is gone", "front_end_1 has 25 descriptors, and had 20"]


def test_growth_is_said_and_what_never_happened_is_wrong() -> None:
    soak = Soak(World(seed=1), seconds=120.0, canaries=100)
    for name, grows in (("engine", 9.0), ("supervisor", 0.0)):
        soak.series[name, 1] = Series(name, 1, samples(grows))
    table = report(soak)
    text = table.text()
    assert "second half +9.00 ± 0.00 MiB/min  < 1 MiB/min (missed)" in text
    assert "second half +0.00 ± 0.00 MiB/min  < 1 MiB/min\n" in text
    assert "made and reset: this has never happened" in table.wrong
    assert not any("MiB" in sentence for sentence in table.wrong)


def test_a_short_run_against_the_real_service_finds_nothing_wrong() -> None:
    """What did not happen in so short a time aside."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.soak", "--seconds", "10"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=115, check=False)
    lines = run.stdout.splitlines()
    wrong = [line for line in lines if "WRONG" in line and not line.endswith("this has never happened")]
    assert not wrong, run.stdout + run.stderr
    assert run.returncode in (0, 1) and lines[-1].startswith("at the end load average"), run.stderr
    found = {name: line for line in lines for name in ("the canary", "front ends killed", "processes") if name in line}
    assert " answers, all alike" in found["the canary"], f"after {time.monotonic() - begun:.0f} s"
    assert found["front ends killed"].split()[3] == "1"
    assert "7 → " in found["processes"] and "missed" not in found["processes"]  # one may have no structures yet


def test_a_call_that_arrives_just_before_a_freeze_is_not_given_up_by_the_default() -> None:
    assert FrontEndSettings().pending_timeout_s >= 2 * FROZEN_S, "the library counts the freeze as waiting"
