"""What `make load` says of a service that does something wrong, and a short run of it against one that does not."""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server

from benchmarks.load.__main__ import _describe_answers
from benchmarks.load.arrivals import poisson
from benchmarks.load.calls import Call, completed
from benchmarks.load.cases import CalmRunFailed, asked, calm_answers, cases
from benchmarks.load.phases import Client, Phase
from benchmarks.load.probes import ABORT, CONTROL, HEALTH, STATS, Answers, probed
from benchmarks.load.table import Table
from runahead.service.contract.errors import exhausted, to_status
from runahead.v1 import (
    AbortResponse,
    GenerationServiceStub,
    StatsResponse,
    generate_pb2,
    generation_service_pb2_grpc,
)

ANSWER = (7, 8, 9)
ACCEPTED = generate_pb2.GenerateResponse(accepted=generate_pb2.Accepted())
DELTA = generate_pb2.GenerateResponse(
    delta=generate_pb2.Delta(tokens=[generate_pb2.Token(id=token_id) for token_id in ANSWER])
)
FINISHED = generate_pb2.GenerateResponse(
    finished=generate_pb2.Finished(usage=generate_pb2.Usage(completion_tokens=len(ANSWER)))
)
WELL = (ACCEPTED, DELTA, FINISHED)


class ScriptedService(generation_service_pb2_grpc.GenerationServiceServicer):
    """Every completion has the events of `script`, and then `ends` says how its call ends."""

    def __init__(self) -> None:
        self.script: tuple[generate_pb2.GenerateResponse, ...] = WELL
        self.ends: Callable[[Any], None] = lambda context: None
        self.released = threading.Event()

    def Generate(self, request: Any, context: Any) -> Iterator[generate_pb2.GenerateResponse]:
        yield from self.script
        self.ends(context)


class Answering(generation_service_pb2_grpc.GenerationServiceServicer):
    """An operator's calls."""

    def Stats(self, request: Any, context: Any) -> StatsResponse:
        return StatsResponse()

    def Abort(self, request: Any, context: Any) -> AbortResponse:
        return AbortResponse()


class NotHealthy(HealthServicer):  # type: ignore[misc]  # it has no type information
    """From the third check on."""

    def __init__(self) -> None:
        self._checks = 0
        self.asked = threading.Event()

    def Check(self, request: Any, context: Any) -> HealthCheckResponse:
        self._checks += 1
        if self._checks > 2:
            self.asked.set()
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return HealthCheckResponse(status=HealthCheckResponse.SERVING)


@contextmanager
def side(servicer: Answering | NotHealthy) -> Iterator[int]:
    """A server of it. Yields the port."""
    server = grpc.server(ThreadPoolExecutor(4))
    if isinstance(servicer, Answering):
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    else:
        add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait()


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def url(service: ScriptedService) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    service.released.set()
    server.stop(None).wait()


def called(url: str, patience_s: float = 60.0) -> Call:
    async def call() -> Call:
        async with grpc.aio.insecure_channel(url) as channel:
            return await completed(GenerationServiceStub(channel), cases(1)[0], patience_s=patience_s)

    return asyncio.run(call())


def refuse(context: Any) -> None:
    context.abort_with_status(to_status(exhausted("STREAMS_LIMIT", "no place is free", 1.0)))


def wait(event: threading.Event) -> None:
    event.wait()


def fail(context: Any) -> None:
    context.abort(grpc.StatusCode.INTERNAL, "something broke")


def test_a_completion_with_the_tokens_of_the_calm_run_is_right_and_one_with_others_is_not(url: str) -> None:
    call = called(url)
    assert (call.code, call.tokens, call.is_refused) == (grpc.StatusCode.OK, ANSWER, False)
    assert call.accepted_s and call.first_token_s
    assert call.began_s <= call.accepted_s <= call.first_token_s <= call.ended_s
    assert call.wrong(ANSWER) == ""
    assert call.wrong((7, 8)) == "its 3 tokens are not the 2 of the calm run"


@pytest.mark.parametrize(
    ("script", "ends", "sentence"),
    [
        ((ACCEPTED, DELTA), None, "the call ended well without an end of its stream"),
        ((*WELL, FINISHED), None, "an event 'finished' followed the end"),
        ((*WELL, DELTA), None, "an event 'delta' followed the end"),
        (WELL, fail, "a status INTERNAL followed the end"),
        ((DELTA, FINISHED), None, "an event 'delta' where it does not belong"),
        ((ACCEPTED, ACCEPTED, DELTA, FINISHED), None, "an event 'accepted' where it does not belong"),
        ((ACCEPTED, FINISHED), None, "0 tokens came and 3 were sent"),
        ((ACCEPTED, DELTA), fail, "ended with INTERNAL (): something broke"),
        ((ACCEPTED, DELTA), refuse, "ended with RESOURCE_EXHAUSTED (STREAMS_LIMIT): no place is free"),
    ],
)
def test_a_stream_that_is_none_is_wrong_and_the_sentence_says_how(
    url: str,
    service: ScriptedService,
    script: tuple[generate_pb2.GenerateResponse, ...],
    ends: Callable[[Any], None] | None,
    sentence: str,
) -> None:
    service.script, service.ends = script, ends or service.ends
    assert called(url).wrong(ANSWER) == sentence


def test_a_stream_that_never_ends_has_lost_its_end(url: str, service: ScriptedService) -> None:
    service.script, service.ends = WELL[:2], lambda context: wait(service.released)
    assert called(url, patience_s=0.5).wrong(ANSWER) == "the call had no end in time"


def test_a_refusal_before_anything_was_done_is_not_wrong(url: str, service: ScriptedService) -> None:
    service.script, service.ends = (), refuse
    call = called(url)
    assert call.is_refused and call.reason == "STREAMS_LIMIT"
    assert call.wrong(ANSWER) == ""


def test_a_calm_run_that_is_not_served_ends_everything(url: str, service: ScriptedService) -> None:
    service.script, service.ends = (), fail

    async def calm() -> None:
        async with grpc.aio.insecure_channel(url) as channel:
            await calm_answers(GenerationServiceStub(channel), cases(2))

    with pytest.raises(CalmRunFailed, match="INTERNAL"):
        asyncio.run(calm())


def phase_of(url: str, answers: list[tuple[int, ...]], *, in_a_circle: bool) -> Phase:
    async def run() -> Phase:
        async with grpc.aio.insecure_channel(url) as channel:
            client = Client([GenerationServiceStub(channel)], cases(len(answers)), answers)
            if in_a_circle:
                return await client.circle(3, 0.4, seed=1)
            return await client.open_loop(poisson(1, 5, 100.0, 0.4), 0.4)

    return asyncio.run(run())


@pytest.mark.parametrize("in_a_circle", [True, False])
def test_a_phase_counts_its_calls_and_names_each_with_other_tokens(url: str, in_a_circle: bool) -> None:
    right, other = phase_of(url, [ANSWER] * 2, in_a_circle=in_a_circle), (7, 8)
    assert right.calls and right.wrong == []
    mixed = phase_of(url, [ANSWER, other], in_a_circle=in_a_circle)
    assert 0 < len(mixed.wrong) < len(mixed.calls)
    assert set(mixed.wrong) == {"case 1: its 3 tokens are not the 2 of the calm run"}


def test_what_ends_too_early_or_too_late_is_no_part_of_what_the_service_carries() -> None:
    phase = Phase(begun_s=100.0, seconds=40.0)
    for ended_s in (104.9, 105.0, 140.0, 140.1):
        phase.calls.append(Call(100.0, ended_s=ended_s, tokens=ANSWER, is_finished=True))
    phase.calls.append(Call(100.0, code=grpc.StatusCode.RESOURCE_EXHAUSTED, ended_s=120.0))
    assert phase.goodput == 2 * len(ANSWER) / 35.0
    assert len(phase.refused) == 1


def test_arrivals_are_those_of_their_seed_in_order_and_as_many_as_the_rate_says() -> None:
    arrivals = poisson(1, sources=200, per_s=50.0, seconds=100.0)
    assert arrivals == poisson(1, sources=200, per_s=50.0, seconds=100.0)
    assert arrivals != poisson(2, sources=200, per_s=50.0, seconds=100.0)
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times) and times[0] > 0 and times[-1] < 100.0
    assert abs(len(arrivals) - 5000) < 5 * 5000**0.5
    assert {arrival.source for arrival in arrivals} == set(range(200))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert 0.8 < variance / mean**2 < 1.2, "of a Poisson process it is 1; of even gaps it would be 0"


def test_a_salt_is_all_that_a_request_asked_again_differs_in() -> None:
    case = cases()[3]
    again = asked(case, "salt")
    assert again.cache_salt == "salt" and not case.HasField("cache_salt")
    again.ClearField("cache_salt")
    assert again == case == asked(case, "")


def test_a_missed_goal_is_said_and_is_not_wrong() -> None:
    table = Table()
    table.add_time("slow", [0.1] * 100, goal_ms=50.0)
    table.add_time("fast", [0.001] * 100, goal_ms=50.0)
    table.add_time("nothing", [], goal_ms=50.0)
    table.add_bound("refused", "3", "0", holds=False)
    text = table.text()
    assert "p50 100.0 ms, p99 100.0 ms, of 100  p99 < 50 ms (missed)" in text
    assert "p50 1.0 ms, p99 1.0 ms, of 100      p99 < 50 ms\n" in text
    assert "0 (missed)" in text and "WRONG" not in text
    table.wrong += [f"call {number}" for number in range(25)]
    assert "WRONG: call 19\nWRONG: 5 more" in table.text()


def test_a_short_run_against_the_real_service_finds_nothing_wrong() -> None:
    command = [sys.executable, "-m", "benchmarks.load", "--seconds", "2", "--capacity-seconds", "3"]
    run = subprocess.run(
        [*command, "--streams", "20", "--cases", "4"], capture_output=True, text=True, timeout=110, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "WRONG" not in run.stdout
    for name in ("capacity, 96 callers", "70%: admission", "200%: goodput", "200%: a refusal takes", "load average"):
        assert name in run.stdout
    for name in (HEALTH, CONTROL, STATS, ABORT):
        assert re.search(rf"200%: {name} +p50 .* ms, of [1-9]\d* +p99 < 50 ms", run.stdout), run.stdout


def test_an_operator_who_is_not_answered_is_wrong() -> None:
    not_healthy = NotHealthy()
    with side(not_healthy) as health, side(Answering()) as control, side(Answering()) as service:

        async def asked_for_a_while() -> Answers:
            async with probed(f"127.0.0.1:{service}", health, control) as answers:
                assert await asyncio.to_thread(not_healthy.asked.wait, 60.0)
            return answers

        answers = asyncio.run(asked_for_a_while())
    assert set(answers.times_s) == {HEALTH, CONTROL, STATS, ABORT}
    assert answers.times_s[CONTROL] and answers.times_s[STATS] and answers.times_s[ABORT]
    assert answers.wrong and all(sentence == f"{HEALTH}: UNAVAILABLE: not now" for sentence in answers.wrong)
    table = Table()
    _describe_answers(table, answers)
    assert f"WRONG: 200%: {HEALTH}: UNAVAILABLE: not now" in table.text()
