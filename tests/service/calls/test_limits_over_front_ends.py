"""In the real service, a caller has its limits over all front ends, by however many connections it comes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from benchmarks.local_service import LocalService, started_service
from runahead.service.processes.children import FRONT_END_MODULE
from runahead.v1 import (
    AbortOutcome,
    AbortRequest,
    FinishReason,
    GenerateRequest,
    GenerationServiceStub,
    StatsRequest,
    StoppingOptions,
    TokenizeRequest,
)
from tests.service.calls.test_access import ALICE, BOB, CALLERS, OPS, bearer
from tests.service.rpc_errors import code, detail, failure
from tests.service.service_processes import running

TIMEOUT_S = 60.0
MOST = 6  # streams of a caller
FRONT_ENDS = 2
ENDLESS = GenerateRequest(text="def f():\n", stopping=StoppingOptions(max_tokens=2000, ignore_eos=True))
SHORT = GenerateRequest(text="x", stopping=StoppingOptions(max_tokens=1))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    callers = tmp_path_factory.mktemp("callers") / "callers"
    callers.write_text(CALLERS)
    flags = ["--threads", "1", "--num-blocks", "2000", "--frontends", str(FRONT_ENDS), "--callers", str(callers)]
    with started_service([*flags, "--max-caller-streams", str(MOST), "--max-streams", "64"]) as service:
        yield service


class Connections:
    """Channels with a connection each, as many to one front end as to the other. Which the kernel chooses."""

    def __init__(self, stack: ExitStack, url: str, of_each: int) -> None:
        self.by_front_end: dict[int, list[Any]] = {}
        for number in range(200):
            channel = stack.enter_context(grpc.insecure_channel(url, [("runahead.number", number)]))
            stub: Any = GenerationServiceStub(channel)
            stats = stub.Stats(StatsRequest(), timeout=TIMEOUT_S, metadata=bearer(OPS)).stats
            found = self.by_front_end.setdefault(stats.front_end.answered_by, [])
            if len(found) < of_each:
                found.append(stub)
            if len(self.all) == FRONT_ENDS * of_each:
                return
        raise AssertionError(f"200 connections reached {sorted(self.by_front_end)} alone")

    @property
    def all(self) -> list[Any]:
        return [stub for stubs in self.by_front_end.values() for stub in stubs]


class Bystander(threading.Thread):
    """Has short completions by two connections, one after the other, for as long as a test runs."""

    def __init__(self, stubs: list[Any]) -> None:
        super().__init__()
        self._stubs = stubs
        self.ended = threading.Event()
        self.served = 0
        self.failures: list[grpc.RpcError] = []

    def run(self) -> None:
        while not self.ended.is_set():
            for stub in self._stubs:
                try:
                    events = list(stub.Generate(SHORT, timeout=TIMEOUT_S, metadata=bearer(BOB)))
                    self.served += events[-1].HasField("finished")
                except grpc.RpcError as error:
                    self.failures.append(error)


def attack(stubs: list[Any], times: int) -> tuple[list[Any], list[Any]]:
    """Endless streams of one caller on every connection, all at once: those that are let in, and how the others
    end."""
    calls = [stub.Generate(ENDLESS, timeout=TIMEOUT_S, metadata=bearer(ALICE)) for _ in range(times) for stub in stubs]
    let_in, refused = [], []
    for call in calls:
        try:
            next(call)
            let_in.append(call)
        except grpc.RpcError as error:
            refused.append(error)
    return let_in, refused


def test_one_caller_over_eight_connections_has_its_limit_and_a_bystander_is_never_refused(
    service: LocalService,
) -> None:
    with ExitStack() as stack:
        connections = Connections(stack, service.url, of_each=4)
        bystander = Bystander([stubs[0] for stubs in connections.by_front_end.values()])
        bystander.start()
        try:
            let_in, refused = attack(connections.all, times=5)
            assert MOST <= len(let_in) < MOST + FRONT_ENDS, "of two that look at once, one may let in one too many"
            assert len(let_in) + len(refused) == 40
            for error in refused:
                assert code(error) == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert detail(error, error_details_pb2.ErrorInfo).reason == "CALLER_STREAMS_LIMIT"
                assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
            before = bystander.served
            while bystander.served < before + 4:
                assert bystander.is_alive() and not bystander.failures
            for call in let_in:
                call.cancel()
        finally:
            bystander.ended.set()
            bystander.join(TIMEOUT_S)
        assert bystander.failures == [] and bystander.served > 0


def stats_of(stub: Any) -> Any:
    return stub.Stats(StatsRequest(), timeout=TIMEOUT_S, metadata=bearer(OPS)).stats


def open_streams(stub: Any) -> int:
    return int(stats_of(stub).front_end.open_streams)


@contextmanager
def waiting_text(first: Any, second: Any) -> Iterator[Any]:
    """A call of alice's by the first connection, with the id `x`, whose text waits for others that take long."""
    slow = TokenizeRequest(text="a" * (1 << 20))  # of which no piece can be cut off
    calls = [first.Tokenize.future(slow, timeout=TIMEOUT_S, metadata=bearer(BOB)) for _ in range(8)]
    request = GenerateRequest(text="a" * 50_000, request_id="x")
    call = first.Generate(request, timeout=TIMEOUT_S, metadata=bearer(ALICE))
    while not stats_of(second).requests.preparing:
        assert call.is_active()
    yield call
    for slow_call in calls:
        slow_call.cancel()


def test_a_request_whose_text_waits_is_known_to_the_other_front_end(service: LocalService) -> None:
    with ExitStack() as stack:
        connections = Connections(stack, service.url, of_each=1)
        (first,), (second,) = connections.by_front_end[1], connections.by_front_end[2]
        with waiting_text(first, second) as call:
            same = GenerateRequest(text="x", request_id="x", stopping=StoppingOptions(max_tokens=1))
            error = failure(lambda: list(second.Generate(same, timeout=TIMEOUT_S, metadata=bearer(ALICE))))
            assert code(error) == grpc.StatusCode.ALREADY_EXISTS
            others = second.Abort(AbortRequest(all=True), timeout=TIMEOUT_S, metadata=bearer(BOB)).results
            assert list(others) == []
            by_id = AbortRequest(request_ids=["x"])
            (result,) = second.Abort(by_id, timeout=TIMEOUT_S, metadata=bearer(ALICE)).results
            assert result.outcome == AbortOutcome.ABORT_OUTCOME_ABORTED
            assert list(call)[-1].finished.reason == FinishReason.FINISH_REASON_ABORTED
            stats = stats_of(second)
            assert (stats.requests.preparing, stats.lifecycle.aborted["PREPARING"]) == (0, 1)


def test_what_a_caller_held_in_a_front_end_that_is_killed_is_the_caller_s_again(service: LocalService) -> None:
    with ExitStack() as stack:
        connections = Connections(stack, service.url, of_each=1)
        while open_streams(connections.all[0]):
            pass  # of the test before
        (first,), (second,) = connections.by_front_end[1], connections.by_front_end[2]
        (process,) = others(service, second)
        victims = [first.Generate(ENDLESS, timeout=TIMEOUT_S, metadata=bearer(ALICE)) for _ in range(MOST - 1)]
        for call in victims:
            next(call)
        with waiting_text(first, second) as waiting:
            _, refused = attack([second], times=1)
            assert [detail(error, error_details_pb2.ErrorInfo).reason for error in refused] == ["CALLER_STREAMS_LIMIT"]
            os.kill(process, signal.SIGKILL)
            for call in (*victims, waiting):
                assert code(failure(lambda call=call: list(call))) == grpc.StatusCode.UNAVAILABLE  # type: ignore[misc]
        while stats_of(second).requests.preparing:
            pass  # the engine has not heard of it yet
        same = GenerateRequest(text="x", request_id="x", stopping=StoppingOptions(max_tokens=1))
        assert list(second.Generate(same, timeout=TIMEOUT_S, metadata=bearer(ALICE)))[-1].HasField("finished")
        while open_streams(second):
            pass  # the supervisor has not heard of it yet
        let_in, refused = attack([second], times=MOST)
        assert (len(let_in), refused) == (MOST, [])
        for call in let_in:
            call.cancel()


def others(service: LocalService, survivor: Any) -> list[int]:
    """The processes of front ends that do not serve a connection: it is served while they are stopped."""
    front_ends = running(service, FRONT_END_MODULE)
    stopped: list[int] = []
    for process in front_ends:
        os.kill(process, signal.SIGSTOP)
        try:
            survivor.Tokenize(TokenizeRequest(text="x"), timeout=2, metadata=bearer(ALICE))
            stopped.append(process)
        except grpc.RpcError as error:
            assert code(error) == grpc.StatusCode.DEADLINE_EXCEEDED
        finally:
            os.kill(process, signal.SIGCONT)
    assert len(stopped) == 1, "one of them serves the survivor's connection"
    return stopped
