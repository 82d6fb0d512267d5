"""Trace: when host and device did what, on one clock, for who may know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.figures import MAX_TRACED, LaunchTimes, Trace
from runahead.service.calls.admission import Access
from runahead.service.credentials.callers import CallersFile
from runahead.service.servers.supervised import Security
from runahead.service.stats.trace import as_response, device_clock
from runahead.v1 import TraceRequest, TraceResponse
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.rpc_errors import code, failure, fields
from tests.service.running_service import Service

DEVICE_BEGAN_NS = 7_000_000_000  # the host's clock when the device's stood at 0


def launch(number: int, begin_us: int, **changes: object) -> LaunchTimes:
    """One that the device ran from 400 to 1,000 µs after `begin_us`, all of it as the host's clock has it."""
    at = 1000.0 + begin_us / 1e6
    on_device = 1_000_000_000_000 + 1000 * begin_us - DEVICE_BEGAN_NS
    fields = {
        "number": number, "kind": "decode", "rows": 8, "prompt_tokens": 0, "overlapped": True, "first": False,
        "plan_s": at, "stage_s": at + 50e-6, "launch_s": at + 70e-6, "enqueued_s": at + 100e-6,
        "commit_s": at + 500e-6, "publish_s": at + 520e-6, "published_s": at + 530e-6, "ended_s": at + 1010e-6,
        "start_ns": on_device + 400_000, "end_ns": on_device + 1_000_000, "idle_inside_ns": 1500,
    }  # fmt: skip
    return LaunchTimes(**{**fields, **changes})  # type: ignore[arg-type]


TRACED = Trace(tuple(launch(number, 600 * number) for number in range(1, 6)), ((1000.0002, 1000.0005),))


def us(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e3


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    path = tmp_path / "engine.sock"
    info = m.EngineInfo("m", "a", 100, 128, (1,), -1, 2, 3, 4, 8, 2, "cuda", "bfloat16", 5)
    engine = FakeEngine(path, m.Welcome(m.PROTOCOL_VERSION, "server-1", info))
    engine.trace = TRACED
    with Service(engine, path) as running:
        yield running


def test_the_device_s_times_are_shown_on_the_host_s_clock(service: Service) -> None:
    response = service.stub.Trace(TraceRequest(), timeout=TIMEOUT_S)
    assert [each.number for each in response.launches] == [1, 2, 3, 4, 5]
    first = response.launches[0]
    # The wait began 400 µs before the plan.
    assert (us(response.waits[0].begin), us(response.waits[0].end)) == pytest.approx((0, 300), abs=0.5)
    assert (us(first.plan.begin), us(first.plan.end), us(first.stage.end)) == pytest.approx((400, 450, 470), abs=0.5)
    assert (us(first.launch.begin), us(first.launch.end)) == pytest.approx((470, 500), abs=0.5)
    assert (us(first.commit.begin), us(first.publish.begin), us(first.publish.end)) == pytest.approx(
        (900, 920, 930), abs=0.5
    )
    # By the host alone, the device began 0 to 330 µs after it was called, and had ended 0 to 10 before that was seen.
    slack = us(response.clock_slack)
    assert slack == pytest.approx((330 + 10) / 2, abs=0.5)
    assert us(first.device.begin) == pytest.approx(800, abs=slack)
    assert us(first.device.end) - us(first.device.begin) == pytest.approx(600, abs=0.01)
    assert us(first.idle_inside) == 1.5
    assert (first.kind, first.rows, first.overlapped, first.first_after_idle) == ("decode", 8, True, False)


def test_a_device_that_reads_the_host_s_clock_needs_no_reckoning() -> None:
    times = launch(1, 0, start_ns=1_000_000_100_000, end_ns=1_000_000_200_000)
    response = as_response(Trace((times,), ()), shares_clock=True)
    assert us(response.launches[0].device.begin) == pytest.approx(100, abs=0.01)
    assert us(response.clock_slack) == 0


def test_each_rank_s_device_is_shown_on_the_host_s_clock_by_a_reckoning_of_its_own() -> None:
    """Rank 1's clock is 3 s ahead of rank 0's; it runs each launch 50 µs later."""
    ahead = 3_000_000_000 + 50_000
    launches = tuple(
        launch(n, 600 * n, other_ranks_ns=((own.start_ns + ahead, own.end_ns + ahead - 50_000),))
        for n in range(1, 6)
        for own in (launch(n, 600 * n),)
    )
    response = as_response(Trace(launches, ()), shares_clock=False)
    slack = us(response.clock_slack)
    for each in response.launches:
        (other,) = each.other_ranks
        assert us(other.begin) == pytest.approx(us(each.device.begin) + 50, abs=2 * slack)
        assert us(other.end) - us(other.begin) == pytest.approx(550, abs=0.01)


def test_clocks_that_drift_apart_are_told_of_by_how_much() -> None:
    """The second launch ran 2,000 µs earlier, by the device's clock, than the first allows."""
    drifted = launch(2, 600, start_ns=launch(2, 600).start_ns - 2_000_000, end_ns=launch(2, 600).end_ns - 2_000_000)
    _, slack_ns = device_clock([launch(1, 0), drifted])
    assert slack_ns == pytest.approx((2_000_000 - 330_000 - 10_000) / 2, abs=500)


@pytest.mark.parametrize(("asked", "numbers"), [(1, [5]), (3, [3, 4, 5]), (MAX_TRACED, [1, 2, 3, 4, 5])])
def test_so_many_of_the_newest_are_shown(asked: int, numbers: list[int], service: Service) -> None:
    response = service.stub.Trace(TraceRequest(launches=asked), timeout=TIMEOUT_S)
    assert [each.number for each in response.launches] == numbers


@pytest.mark.parametrize("asked", [0, MAX_TRACED + 1, (1 << 32) - 1])
def test_another_number_is_refused_by_its_path(asked: int, service: Service) -> None:
    error = failure(lambda: service.stub.Trace(TraceRequest(launches=asked), timeout=TIMEOUT_S))
    assert (code(error), fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["launches"])


def test_before_the_first_launch_the_answer_is_empty(service: Service) -> None:
    service.engine.trace = Trace((), ())
    assert service.stub.Trace(TraceRequest(), timeout=TIMEOUT_S) == TraceResponse()


def test_an_engine_that_falls_silent_answers_unavailable(service: Service) -> None:
    service.engine.answers_stats = False
    call = service.stub.Trace.future(TraceRequest(), timeout=TIMEOUT_S)
    service.engine.fall_silent()
    assert code(failure(call.result)) == grpc.StatusCode.UNAVAILABLE


def test_who_may_generate_alone_sees_no_trace(tmp_path: Path) -> None:
    file = tmp_path / "callers"
    file.write_text("ops control token the-operators-token-0123\nall generate token anybody-s-token-012345\n")
    path = tmp_path / "engine.sock"
    with Service(FakeEngine(path), path, security=Security(Access(CallersFile(file)), None)) as running:
        token = {"ops": "the-operators-token-0123", "all": "anybody-s-token-012345"}

        def asked(caller: str) -> TraceResponse:
            metadata = [("authorization", f"Bearer {token[caller]}")]
            response: TraceResponse = running.stub.Trace(TraceRequest(), timeout=TIMEOUT_S, metadata=metadata)
            return response

        assert asked("ops") == TraceResponse()
        assert code(failure(lambda: asked("all"))) == grpc.StatusCode.PERMISSION_DENIED
