"""WatchStats: the figures at first, and again whenever one has changed, for as many as there is room for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import grpc
import msgspec
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from runahead.runtime.wire.figures import EngineStats
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.calls.call import Call, serving
from runahead.service.contract.errors import ServiceError
from runahead.service.contract.limits import LIMITS
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import StalledReaderError
from runahead.service.shared_memory.board import Board
from runahead.service.stats.stats import StatsFeed
from runahead.v1 import GenerateRequest, ServerStats, StatsRequest, WatchStatsRequest
from tests.service.fake_engine import STATS, TIMEOUT_S
from tests.service.rpc_errors import code, detail, failure, fields
from tests.service.running_service import Service

SLEEP = asyncio.sleep  # itself, whatever stands in its place
OFTEN = WatchStatsRequest(interval=Duration(nanos=50_000_000))


def reason(error: grpc.RpcError) -> str:
    return str(detail(error, error_details_pb2.ErrorInfo).reason)


def watch(service: Service, request: WatchStatsRequest = OFTEN) -> Any:
    return service.stub.WatchStats(request, timeout=TIMEOUT_S)


# ---------------------------------------------------------------- what is told


def test_figures_come_at_once_and_again_when_one_has_changed(service: Service) -> None:
    watcher = watch(service)
    first = next(watcher).stats
    assert (first.requests.waiting, first.tokens.queried, first.server_id) == (1, 64, "server-1")
    assert (first.queue_histogram.count, first.end_to_end_histogram.sum_s) == (4, 3500.5)
    assert first.front_end.stats_watchers == 1
    service.engine.stats = msgspec.structs.replace(STATS, waiting=7)
    assert next(watcher).stats.requests.waiting == 7
    watcher.cancel()


def test_time_that_passes_is_no_change(service: Service) -> None:
    watcher = watch(service)
    next(watcher)
    asked = service.engine.stats_queries
    service.engine.stats = msgspec.structs.replace(STATS, uptime_s=99.0, host_s=9.0, waits=99)
    while service.engine.stats_queries < asked + 3:
        assert watcher.is_active()
    service.engine.stats = msgspec.structs.replace(service.engine.stats, waiting=7)
    assert next(watcher).stats.requests.waiting == 7, "nothing came in between"
    watcher.cancel()


def test_what_a_front_end_counts_is_a_change_too(service: Service) -> None:
    watcher = watch(service)
    assert next(watcher).stats.front_end.open_streams == 0
    call = service.stub.Generate(GenerateRequest(text="once"), timeout=60)
    assert next(watcher).stats.front_end.open_streams == 1
    call.cancel()
    watcher.cancel()


class Asked:
    """An engine that answers each question when it is told to, with figures that are always new."""

    server_id = "server-1"

    def __init__(self) -> None:
        self.questions: list[asyncio.Future[EngineStats]] = []
        self.changes = True

    async def stats(self) -> EngineStats:
        self.questions.append(asyncio.get_running_loop().create_future())
        return await self.questions[-1]

    def answer(self) -> None:
        self.questions[-1].set_result(msgspec.structs.replace(STATS, waiting=len(self.questions) * self.changes))


class Reader:
    """A call that keeps what is written to it."""

    def __init__(self) -> None:
        self.written: list[ServerStats] = []
        self.takes = asyncio.Event()  # what is written, as long as it is set
        self.takes.set()

    async def send_initial_metadata(self, headers: object) -> None:
        pass

    async def write(self, response: Any) -> None:
        self.written.append(response.stats)
        await self.takes.wait()

    def cancelled(self) -> bool:
        return False


async def until(there: Callable[[], object]) -> None:
    for _ in range(10_000):
        if there():
            return
        await SLEEP(0.001)
    raise AssertionError("it does not come")


def feed_of(engine: Asked, stalled_s: float = TIMEOUT_S) -> StatsFeed:
    board = Board()
    return StatsFeed(cast(SocketEngineClient, engine), board, board.line(0), "0.1.0", stalled_s)


def test_the_interval_is_the_least_time_between_two_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def asleep(seconds: float) -> None:
        slept.append(seconds)
        await SLEEP(0)

    async def watched() -> list[int]:
        engine, reader = Asked(), Reader()
        request = WatchStatsRequest(interval=Duration(seconds=2))
        task = asyncio.create_task(feed_of(engine).watch(request, cast(Any, reader)))
        for question in range(1, 5):
            await until(lambda question=question: len(engine.questions) == question)  # type: ignore[misc]
            engine.changes = question < 3
            engine.answer()
        await until(lambda: len(engine.questions) == 5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [stats.requests.waiting for stats in reader.written]

    monkeypatch.setattr(asyncio, "sleep", asleep)
    assert asyncio.run(watched()) == [1, 2, 0]
    assert slept == [2.0, 2.0, 2.0, 0.25], "a message is followed by the interval, a look without one by a short wait"


def test_the_engine_is_asked_once_for_all_who_watch() -> None:
    async def watched() -> None:
        engine, readers = Asked(), [Reader() for _ in range(3)]
        feed = feed_of(engine)
        tasks = [asyncio.create_task(feed.watch(OFTEN, cast(Any, reader))) for reader in readers]
        await until(lambda: engine.questions)
        tasks[0].cancel()  # whoever asked first goes: the others wait on
        await asyncio.gather(tasks[0], return_exceptions=True)
        assert len(engine.questions) == 1
        engine.answer()
        await until(lambda: all(reader.written for reader in readers[1:]))
        assert len(engine.questions) == 1 and not readers[0].written
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(watched())


@pytest.mark.parametrize("stuck", [1, 2])
def test_a_shutdown_interrupts_every_message_the_first_too_since_the_headers_are_apart(stuck: int) -> None:
    async def watched() -> None:
        engine, reader = Asked(), Reader()
        feed = feed_of(engine)
        task = asyncio.create_task(feed.watch(OFTEN, cast(Any, reader)))
        for message in range(1, stuck + 1):
            await until(lambda message=message: len(engine.questions) == message)  # type: ignore[misc]
            if message == stuck:
                reader.takes.clear()
            engine.answer()
            await until(lambda message=message: len(reader.written) == message)  # type: ignore[misc]
        feed.close()
        with pytest.raises(ServiceError) as ended:
            await task
        assert (ended.value.reason, len(reader.written)) == ("SHUTDOWN", stuck)

    asyncio.run(watched())


@pytest.mark.parametrize(
    "interval",
    [Duration(), Duration(nanos=49_000_000), Duration(seconds=-1), Duration(seconds=3601), Duration(seconds=1 << 62)],
)
def test_an_interval_out_of_bounds_is_refused_by_name(service: Service, interval: Duration) -> None:
    error = failure(lambda: list(watch(service, WatchStatsRequest(interval=interval))))
    assert code(error) == grpc.StatusCode.INVALID_ARGUMENT
    assert fields(error) == ["interval"]


@pytest.mark.parametrize("interval", [Duration(nanos=2 * 10**9), Duration(seconds=2, nanos=-1)])
def test_an_interval_that_is_no_duration_is_refused_and_not_added_up(service: Service, interval: Duration) -> None:
    error = failure(lambda: list(watch(service, WatchStatsRequest(interval=interval))))
    assert code(error) == grpc.StatusCode.INVALID_ARGUMENT
    assert f"{interval.nanos} nanos beside {interval.seconds} seconds" in (error.details() or "")
    assert fields(error) == ["interval"]


# ---------------------------------------------------------------- how it ends


def test_a_shutdown_ends_watchers_at_once_and_waits_for_completions(service: Service) -> None:
    watcher = watch(service, WatchStatsRequest(interval=Duration(seconds=3600)))
    next(watcher)
    stream = service.stub.Generate(GenerateRequest(text="once"), timeout=60)
    handle = service.engine.next_submit().handle
    service.stop(grace_s=60)
    error = failure(lambda: list(watcher))
    assert (code(error), reason(error)) == (grpc.StatusCode.UNAVAILABLE, "SHUTDOWN")
    late = failure(lambda: list(watch(service)))
    assert reason(late) == "SHUTDOWN"
    service.engine.output(handle, [1], FinishReason.LENGTH)
    assert list(stream)[-1].HasField("finished"), "the completion has had its grace"


def test_a_shutdown_ends_a_watcher_that_waits_for_the_engine(service: Service) -> None:
    stream = service.stub.Generate(GenerateRequest(text="once"), timeout=60)
    handle = service.engine.next_submit().handle
    service.engine.answers_stats = False
    watcher = watch(service)
    while not service.engine.stats_queries:
        assert watcher.is_active()
    service.stop(grace_s=60)
    assert reason(failure(lambda: list(watcher))) == "SHUTDOWN"
    service.engine.output(handle, [1], FinishReason.LENGTH)
    assert list(stream)[-1].HasField("finished")


def test_an_engine_that_falls_silent_ends_watchers(service: Service) -> None:
    watcher = watch(service)
    next(watcher)
    service.engine.answers_stats = False
    service.engine.fall_silent()
    assert reason(failure(lambda: list(watcher))) == "ENGINE_SILENT"


def test_watchers_have_a_bound_of_their_own(service: Service) -> None:
    watchers = [watch(service) for _ in range(LIMITS.stats_watchers)]
    for watcher in watchers:
        next(watcher)
    error = failure(lambda: list(watch(service)))
    assert (code(error), reason(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "WATCHERS_LIMIT")
    assert detail(error, error_details_pb2.QuotaFailure) is not None
    stats = service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats.front_end
    assert (stats.stats_watchers, stats.open_streams, stats.refused) == (LIMITS.stats_watchers, 0, 0)
    stream = service.stub.Generate(GenerateRequest(text="once"), timeout=TIMEOUT_S)
    assert next(stream).HasField("accepted"), "completions have bounds of their own, too"
    stream.cancel()
    watchers.pop().cancel()
    while service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats.front_end.stats_watchers == len(watchers) + 1:
        pass  # until the server has heard of it
    assert next(watch(service)).HasField("stats")
    for watcher in watchers:
        watcher.cancel()


def test_watchers_that_nobody_reads_give_their_places_back_and_say_why() -> None:
    async def watched() -> None:
        engine, reader = Asked(), Reader()
        feed = feed_of(engine, stalled_s=0.2)
        task = asyncio.create_task(feed.watch(OFTEN, cast(Any, reader)))
        await until(lambda: engine.questions)
        reader.takes.clear()
        engine.answer()
        await until(lambda: reader.written)
        assert feed._counters.stats_watchers == 1
        with pytest.raises(StalledReaderError):
            await asyncio.wait_for(task, TIMEOUT_S)
        assert feed._counters.stats_watchers == 0

    asyncio.run(watched())


def test_a_caller_who_has_a_name_may_have_half_of_the_watchers() -> None:
    async def watched() -> None:
        feed = feed_of(Asked())

        def watch_as(caller: str) -> asyncio.Task[None]:
            with serving(Call(caller=caller)):
                return asyncio.create_task(feed.watch(OFTEN, cast(Any, Reader())))

        share = LIMITS.stats_watchers // 2
        tasks = [watch_as("alice") for _ in range(share)]
        with pytest.raises(ServiceError, match=f"you have {share} calls") as refused:
            await watch_as("alice")
        assert refused.value.reason == "WATCHERS_LIMIT"
        tasks += [watch_as("bob") for _ in range(share)]
        await until(lambda: feed._counters.stats_watchers == LIMITS.stats_watchers)
        feed.close()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {cast(ServiceError, end).reason for end in ends} == {"SHUTDOWN"}

    asyncio.run(watched())
