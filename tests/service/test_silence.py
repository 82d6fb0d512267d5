"""An engine that says nothing: the service is not ready meanwhile, figures are refused at once, streams wait for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.engine_client import SocketEngineClient
from runahead.service.pulse import LOOKS, SILENT_S, EngineWatch, stuck_after_s
from runahead.service.request_stream import EngineLostError
from runahead.service.validation import check_request
from runahead.v1 import GenerateRequest, StatsRequest
from tests.service.fake_engine import INFO, TIMEOUT_S, FakeEngine
from tests.service.rpc_errors import code, detail, failure
from tests.service.running_service import Service

GENERATION = "runahead.v1.GenerationService"
IMPATIENT_S = 0.3
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
        stream = client.submit(check_request(GenerateRequest(text="x"), INFO), np.array([1, 2], np.int32))
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


def test_two_heartbeats_may_be_missing_and_the_service_is_not_ready_within_two_seconds() -> None:
    longest_s = m.HEARTBEAT_S + 0.25  # the loop waits so long at most
    assert 2 * longest_s <= SILENT_S < SILENT_S * (LOOKS + 1) / LOOKS < 2.0


@pytest.mark.parametrize("launch_timeout_s", [0.3, 120.0, 604_800.0])
def test_an_engine_that_can_end_itself_does_so_before_it_is_killed(launch_timeout_s: float) -> None:
    looks, turn_s = 8, 1.0  # of the guard inside the engine
    assert (launch_timeout_s + turn_s) * (looks + 1) / looks < stuck_after_s(launch_timeout_s)


class Stoppable(selectors.DefaultSelector):
    """What an event loop of a process waits with that is stopped (SIGSTOP) for a while. Its wait is interrupted: when
    it goes on, the time is over and the wait brings nothing, although something has come."""

    def __init__(self) -> None:
        super().__init__()
        self.stops = 0
        self._stop_s = self._stopped_s = 0.0

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=self._loop) as runner:
            runner.run(work)

    async def stopped_for(self, seconds: float) -> None:
        """Returns when the process goes on."""
        self._stop_s = seconds
        await asyncio.sleep(0)  # the stop
        await asyncio.sleep(0)  # what was due meanwhile

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._stop_s:
            return super().select(timeout)
        assert super().select(TIMEOUT_S), "the engine has said something meanwhile"
        self._stopped_s, self._stop_s = self._stopped_s + self._stop_s, 0.0
        self.stops += 1
        return []

    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(self)
        awake_s = loop.time
        loop.time = lambda: awake_s() + self._stopped_s  # type: ignore[method-assign]
        return loop


def run(path: Path, body, stoppable: Stoppable | None = None) -> None:  # type: ignore[no-untyped-def]
    """Runs `body(client, engine)` with a connected client that is soon impatient."""

    async def connected() -> None:
        client = await SocketEngineClient.connect(path, silent_s=IMPATIENT_S)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await body(client, engine)
        finally:
            client.close("SHUTDOWN", "the test is over")
            await asyncio.sleep(0)

    engine = FakeEngine(path)
    try:
        (stoppable or Stoppable()).run(connected())
    finally:
        engine.close()
