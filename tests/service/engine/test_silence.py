"""An engine that says nothing: the service is not ready meanwhile, figures are refused at once, streams wait for it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from runahead.runtime import watchdog
from runahead.runtime.engine import loop as engine_loop
from runahead.runtime.process import main
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import check_request
from runahead.service.engine import engine_client, pulse
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.pulse import CHECKS, SILENT_S, EngineWatch, stuck_after_s
from runahead.service.engine.request_stream import EngineLostError
from runahead.v1 import GenerateRequest, StatsRequest
from tests.service.engine.virtual_time import IMPATIENT_S, Stoppable, VirtualEvent, VirtualTime, run
from tests.service.fake_engine import INFO, TIMEOUT_S, FakeEngine
from tests.service.rpc_errors import code, detail, failure
from tests.service.running_service import Service

GENERATION = "runahead.v1.GenerationService"
UNSENT_BYTES = 1 << 20
CHECKED, PROMPT = check_request(GenerateRequest(text="x"), INFO), np.array([1, 2], np.int32)
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


def test_the_service_is_not_ready_while_the_engine_is_silent_and_the_server_lives(service: Service) -> None:
    health = HealthStub(service.channel)
    watch = health.Watch(HealthCheckRequest(service=GENERATION), timeout=60)
    assert next(watch).status == SERVING
    stream = service.stub.Generate(GenerateRequest(text="once"), timeout=60)
    handle = service.engine.next_submit().handle
    assert next(stream).HasField("accepted")
    service.engine.fall_silent()
    assert next(watch).status == NOT_SERVING
    assert health.Check(HealthCheckRequest(service=GENERATION), timeout=TIMEOUT_S).status == NOT_SERVING
    assert health.Check(HealthCheckRequest(), timeout=TIMEOUT_S).status == SERVING
    service.engine.answers_stats = False
    error = failure(lambda: service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S))
    assert code(error) == grpc.StatusCode.UNAVAILABLE
    assert detail(error, error_details_pb2.ErrorInfo).reason == "ENGINE_SILENT"
    service.engine.speak_again()
    assert next(watch).status == SERVING
    service.engine.output(handle, [1], FinishReason.LENGTH)
    assert list(stream)[-1].HasField("finished"), "the stream has waited for it"


def test_a_silent_engine_that_is_lost_is_not_ready_and_not_alive(service: Service) -> None:
    watches = [
        HealthStub(service.channel).Watch(HealthCheckRequest(service=name), timeout=60) for name in ("", GENERATION)
    ]
    assert [next(watch).status for watch in watches] == [SERVING, SERVING]
    service.engine.fall_silent()
    assert next(watches[1]).status == NOT_SERVING
    service.engine.die()
    service.call(service.front_end.engine_lost)
    assert next(watches[0]).status == NOT_SERVING


def test_who_waits_for_figures_when_the_engine_falls_silent_waits_no_longer(tmp_path: Path) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        told: asyncio.Queue[bool] = asyncio.Queue()
        client.tell_of_silence(told.put_nowait)
        engine.answers_stats = False
        waiting = asyncio.ensure_future(client.stats())
        stream = client.submit(CHECKED, PROMPT)
        await stream.accepted()
        engine.fall_silent()
        with pytest.raises(EngineLostError, match="does not answer") as failed:
            await waiting
        assert failed.value.reason == "ENGINE_SILENT"
        assert await told.get() is True
        assert stream.failure is None
        engine.speak_again()
        assert await told.get() is False
        engine.answers_stats = True
        assert (await client.stats()).submitted
        client.release(stream)

    run(tmp_path / "engine", body)


def test_a_silent_engine_gets_no_request_and_no_abort_and_still_what_is_cancelled(tmp_path: Path) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        told: asyncio.Queue[bool] = asyncio.Queue()
        client.tell_of_silence(told.put_nowait)
        stream = client.submit(CHECKED, PROMPT)
        await stream.accepted()
        engine.fall_silent()
        assert await told.get() is True
        with pytest.raises(EngineLostError, match="does not answer") as failed:
            client.submit(CHECKED, PROMPT)
        assert failed.value.reason == "ENGINE_SILENT"
        with pytest.raises(EngineLostError, match="does not answer") as failed:
            await client.abort(("r1",), all_requests=False)
        assert failed.value.reason == "ENGINE_SILENT"
        client.release(stream)
        assert await asyncio.to_thread(engine.next_cancel) == stream.handle
        assert engine.submitted.qsize() == 1 and not engine.aborts
        engine.speak_again()
        assert await told.get() is False
        await client.submit(CHECKED, PROMPT).accepted()

    run(tmp_path / "engine", body)


def test_an_engine_that_does_not_read_gets_no_more_than_the_limit_before_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        assert client._transport is not None
        engine.auto_accept = False
        engine.reads.clear()
        sent, largest = 0, 0
        with pytest.raises(EngineLostError) as failed:
            while sent * prompt.nbytes < 10 * UNSENT_BYTES:  # over the limit, whatever the kernel holds of it
                before = client._transport.get_write_buffer_size()
                client.submit(CHECKED, prompt)
                sent += 1
                largest = max(largest, client._transport.get_write_buffer_size() - before)
        assert failed.value.reason == "ENGINE_SILENT"
        assert UNSENT_BYTES < client._transport.get_write_buffer_size() <= UNSENT_BYTES + largest
        assert not client._pulse.is_silent
        engine.reads.set()
        for _ in range(sent):
            await asyncio.to_thread(engine.next_submit)
        assert (await client.stats()).submitted, "it has read all of it"

    monkeypatch.setattr(engine_client, "LIMITS", replace(LIMITS, unsent_bytes=UNSENT_BYTES))
    prompt = np.ones(10_000, np.int32)
    run(tmp_path / "engine", body)


def test_who_asks_to_be_told_of_a_silence_is_told_of_one_that_is_there(tmp_path: Path) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        first: asyncio.Queue[bool] = asyncio.Queue()
        late: list[bool] = []
        client.tell_of_silence(first.put_nowait)
        engine.fall_silent()
        assert await first.get() is True
        client.tell_of_silence(late.append)
        assert late == [True]

    run(tmp_path / "engine", body)


def test_any_word_of_the_engine_is_a_sign_of_life(tmp_path: Path) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        told: asyncio.Queue[bool] = asyncio.Queue()
        client.tell_of_silence(told.put_nowait)
        engine.fall_silent()
        assert await told.get() is True
        engine.send(m.Accepted(7))
        assert await told.get() is False

    run(tmp_path / "engine", body)


def test_an_engine_that_is_silent_for_too_long_is_stuck_and_one_that_has_ended_is_not(tmp_path: Path) -> None:
    async def watched(path: Path, limit_s: float) -> None:
        engine = FakeEngine(path)
        watch = await EngineWatch.connect(path, limit_s)
        stuck = asyncio.ensure_future(watch.wait_stuck())
        assert await asyncio.to_thread(engine.greeted.wait, TIMEOUT_S)
        assert not stuck.done()
        if limit_s < 1:
            engine.fall_silent()
            await asyncio.wait_for(stuck, TIMEOUT_S)
        else:
            engine.die()
            assert await asyncio.to_thread(engine.gone.wait, TIMEOUT_S)
            assert not watch._pulse.is_silent
            stuck.cancel()
        watch.close()
        await asyncio.to_thread(engine.close)

    asyncio.run(watched(tmp_path / "a", IMPATIENT_S))
    asyncio.run(watched(tmp_path / "b", 60.0))


def test_a_watch_that_the_engine_ends_says_so_and_one_that_is_closed_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watched(path: Path, *, dies: bool) -> None:
        told: asyncio.Queue[str] = asyncio.Queue()
        logger = Mock()
        logger.warning = lambda event, **_: told.put_nowait(event)
        monkeypatch.setattr(pulse, "log", logger)
        engine = FakeEngine(path)
        watch = await EngineWatch.connect(path, 60.0)
        assert await asyncio.to_thread(engine.greeted.wait, TIMEOUT_S)
        if dies:
            engine.die()
            assert await asyncio.wait_for(told.get(), TIMEOUT_S) == "engine_unwatched"
        watch.close()
        assert await asyncio.to_thread(engine.gone.wait, TIMEOUT_S)
        assert told.empty()
        await asyncio.to_thread(engine.close)

    asyncio.run(watched(tmp_path / "a", dies=True))
    asyncio.run(watched(tmp_path / "b", dies=False))


def test_there_is_no_watch_without_an_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineLostError, match="could not be reached"):
        asyncio.run(EngineWatch.connect(tmp_path / "nobody", 1.0))


def test_a_process_that_was_busy_itself_does_not_take_that_for_silence(tmp_path: Path) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        told: list[bool] = []
        client.tell_of_silence(told.append)
        loop = asyncio.get_running_loop()
        until = loop.time() + 2 * IMPATIENT_S
        while loop.time() < until:  # the event loop does nothing else for longer than the engine may be silent
            pass
        await client.stats()
        assert told == []

    run(tmp_path / "engine", body)


def test_a_process_that_was_stopped_itself_does_not_take_that_for_silence(tmp_path: Path) -> None:
    async def body(client: SocketEngineClient, engine: FakeEngine) -> None:
        told: list[bool] = []
        client.tell_of_silence(told.append)
        await stoppable.stopped_for(10 * IMPATIENT_S)
        await client.stats()
        assert told == []

    stoppable = Stoppable()
    run(tmp_path / "engine", body, stoppable)
    assert stoppable.stops == 1


def test_a_supervisor_that_was_stopped_does_not_take_the_engine_for_stuck(tmp_path: Path) -> None:
    async def watched() -> None:
        heard = asyncio.Event()
        watch = await EngineWatch.connect(path, IMPATIENT_S)
        await stoppable.stopped_for(10 * IMPATIENT_S)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(watch._pulse, "heard", heard.set)
            await heard.wait()
        assert not watch._stuck.is_set()
        watch.close()
        assert await asyncio.to_thread(engine.gone.wait, TIMEOUT_S)

    path, stoppable = tmp_path / "engine", Stoppable()
    engine = FakeEngine(path)
    stoppable.run(watched())
    assert stoppable.stops == 1
    engine.close()


@pytest.mark.parametrize("phase", [0.01, 0.5, 0.99])
def test_a_heartbeat_may_be_missing_and_the_service_is_not_ready_within_two_seconds(phase: float) -> None:
    """phase: of the heartbeats, between two looks."""
    longest_s = m.HEARTBEAT_S + engine_loop._WAIT_S

    async def watched() -> tuple[float, list[tuple[bool, float]]]:
        time, told = asyncio.get_running_loop().time, list[tuple[bool, float]]()
        watching = pulse.Pulse(SILENT_S, lambda is_silent: told.append((is_silent, time())))
        await asyncio.sleep(phase * SILENT_S / CHECKS)
        for _ in range(20):
            watching.heard()
            heard_s = time()
            await asyncio.sleep(2 * longest_s)
        assert told == []
        await asyncio.sleep(2.0)
        return heard_s, told

    heard_s, told = VirtualTime().run(watched())
    ((is_silent, told_s),) = told
    assert is_silent
    assert told_s - heard_s < 2.0


@pytest.mark.parametrize("launch_timeout_s", [0.3, 120.0, 604_800.0])
def test_an_engine_that_can_end_itself_does_so_before_it_is_killed(
    launch_timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "threading", SimpleNamespace(Event=VirtualEvent, Thread=threading.Thread))
    turns = chain([0], repeat(1))  # the last turn ends as soon as the guard has looked
    stopped = threading.Event()
    guard = watchdog.LoopGuard(lambda: next(turns), launch_timeout_s + main._TURN_S, stopped.set)
    guard.start()
    assert stopped.wait(TIMEOUT_S)
    guard.end()
    limit_s = stuck_after_s(launch_timeout_s)

    async def watched() -> float:
        """Seconds from the last sign of life, which comes shortly before a look, until the engine counts as stuck."""
        time, told = asyncio.get_running_loop().time, asyncio.Event()
        watching = pulse.Pulse(limit_s, lambda is_silent: told.set())
        await asyncio.sleep(0.999 * limit_s / CHECKS)
        watching.heard()
        heard_s = time()
        await told.wait()
        return time() - heard_s

    ended: VirtualEvent = guard._ended  # type: ignore[assignment]
    assert ended.waited_s < VirtualTime().run(watched())
