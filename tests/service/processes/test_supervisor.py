"""The real service with several front ends: what is the service's holds over all of them, whatever dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from benchmarks.local_service import BESIDE, LocalService, started_service
from runahead.service.processes.children import ENGINE_MODULE, FRONT_END_MODULE, SIDE_MODULE
from runahead.service.settings.server_config import EXIT_CANNOT_START
from runahead.service.version import full_version
from runahead.v1 import (
    AbortOutcome,
    AbortRequest,
    GenerateRequest,
    GenerationServiceStub,
    ServerStats,
    StatsRequest,
    StoppingOptions,
)
from tests.service.rpc_errors import code, detail, failure
from tests.service.service_processes import engine_of, has_ended, running, watched

END_S = 30.0
QUICK = ("--threads", "1", "--num-blocks", "600")
SIGNALS_S = 0.001  # between signals
MANY = 200  # connections, of which the kernel gives each front end some


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the services put what is temporary."""
    folder = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        yield folder


@contextlib.contextmanager
def two_front_ends(*flags: str) -> Iterator[LocalService]:
    with started_service([*QUICK, "--frontends", "2", *flags]) as service:
        yield service


@pytest.fixture
def service(places: Path) -> Iterator[LocalService]:
    with two_front_ends() as running:
        yield running


@pytest.fixture(scope="module")
def lasting(places: Path) -> Iterator[LocalService]:
    """The service of tests that leave it as it is."""
    with two_front_ends("--max-streams", "3") as running:
        yield running


@contextlib.contextmanager
def stubs(service: LocalService) -> Iterator[dict[int, GenerationServiceStub]]:
    """A connection to each of two front ends, by their numbers. Which one it reaches is the kernel's choice."""
    with contextlib.ExitStack() as stack:
        found: dict[int, GenerationServiceStub] = {}
        for number in range(MANY):
            # A channel with options of its own has a connection of its own.
            channel = stack.enter_context(grpc.insecure_channel(service.url, [("runahead.number", number)]))
            stub = GenerationServiceStub(channel)
            found.setdefault(stats_of(stub).front_end.answered_by, stub)
            if len(found) == 2:
                yield found
                return
        raise AssertionError(f"{MANY} connections reached {sorted(found)} alone")


def stats_of(stub: GenerationServiceStub) -> ServerStats:
    return stub.Stats(StatsRequest(), timeout=END_S, wait_for_ready=True).stats


def endless(request_id: str, max_tokens: int = 2000) -> GenerateRequest:
    stopping = StoppingOptions(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(text="def f():\n", request_id=request_id, stopping=stopping)


def opened(stub: GenerationServiceStub, request_id: str, max_tokens: int = 2000) -> Any:
    """A stream that has brought text."""
    call = stub.Generate(endless(request_id, max_tokens), timeout=60)
    assert [next(call).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
    return call


def until_refused(stub: GenerationServiceStub) -> None:
    """Calls until this front end knows of the shutdown too, of which each hears by itself."""
    for _ in range(1000):
        call = stub.Generate(GenerateRequest(text="x", stopping=StoppingOptions(max_tokens=1)), timeout=END_S)
        try:
            list(call)
        except grpc.RpcError as error:
            assert detail(error, error_details_pb2.ErrorInfo).reason == "SHUTDOWN"
            return
    raise AssertionError("it takes completions all the time")


def until_logged(service: LocalService, event: bytes) -> None:
    while event not in service.log.read_bytes():
        assert service.process.poll() is None or event in service.log.read_bytes()
        time.sleep(0.02)


def last_event(call: Any) -> str:
    return str(list(call)[-1].WhichOneof("event"))


def check_processes(service: LocalService, stub: GenerationServiceStub) -> None:
    """Each process is named with its number, and what it takes of the machine; the connections are counted."""
    processes = {process.name: process for process in stats_of(stub).processes}
    assert list(processes) == ["supervisor", "engine", "side_server", "front_end_1", "front_end_2"]
    assert processes["supervisor"].pid == service.process.pid
    assert processes["engine"].pid == engine_of(service)
    front_ends = [processes[f"front_end_{number}"].pid for number in (1, 2)]
    assert sorted(front_ends) == running(service, FRONT_END_MODULE)
    assert all(process.resident_bytes > 1 << 20 and process.descriptors > 3 for process in processes.values())
    while stats_of(stub).connections < 2:  # as of the last second
        assert service.process.poll() is None


def test_ids_aborts_figures_and_limits_hold_over_all_front_ends(lasting: LocalService) -> None:
    with stubs(lasting) as by_number:
        one, two = by_number[1], by_number[2]
        calls = {"a": opened(one, "a"), "b": opened(two, "b"), "c": opened(two, "c")}
        for stub in (one, two):
            figures = stats_of(stub)
            assert (figures.front_end.open_streams, figures.front_end.front_ends) == (3, 2)
            assert figures.requests.running == 3
            assert (figures.version, figures.server_id) == (full_version(), stats_of(two).server_id)
            error = failure(lambda stub=stub: list(stub.Generate(endless("d"), timeout=END_S)))  # type: ignore[misc]
            assert detail(error, error_details_pb2.ErrorInfo).reason == "STREAMS_LIMIT"
        check_processes(lasting, one)
        (aborted,) = two.Abort(AbortRequest(request_ids=["a"]), timeout=END_S).results
        assert aborted.outcome == AbortOutcome.ABORT_OUTCOME_ABORTED
        assert last_event(calls["a"]) == "finished", "an abort reaches it through another front end"
        error = failure(lambda: list(one.Generate(endless("b"), timeout=END_S)))
        assert code(error) == grpc.StatusCode.ALREADY_EXISTS, "the other front end has this id"
        results = one.Abort(AbortRequest(all=True), timeout=END_S).results
        assert sorted(result.request_id for result in results) == ["b", "c"]
        assert [last_event(calls[name]) for name in "bc"] == ["finished"] * 2
        assert [stats_of(stub).front_end.refused for stub in (one, two)] == [3, 3]


def test_a_front_end_that_dies_is_started_again_and_harms_nobody_else_s_streams(service: LocalService) -> None:
    with stubs(service) as by_number:
        before, engine = running(service, FRONT_END_MODULE), engine_of(service)
        assert len(before) == 2
        harmed, other = opened(by_number[1], "harmed"), opened(by_number[2], "other", max_tokens=500)
        os.kill(engine, signal.SIGSTOP)  # neither stream ends before the front end does
        os.kill(min(before), signal.SIGKILL)  # the first was started first
        error = failure(lambda: list(harmed))
        os.kill(engine, signal.SIGCONT)
        assert code(error) == grpc.StatusCode.UNAVAILABLE
        assert last_event(other) == "finished"
        # By a new connection, if that is where it leads: the old one may have been the dead one's.
        with stubs(service) as again:
            figures = stats_of(again[2])
            assert figures.lifecycle.front_ends_lost == 1
            assert dict(figures.requests.finished) == {"CANCELLED": 1, "LENGTH": 1}, "its rows are void"
            assert (figures.front_end.front_ends, figures.front_end.open_streams) == (2, 0)
            call = again[1].Generate(endless("harmed"), timeout=60)
            assert next(call).HasField("accepted"), "its id is free again"
            call.cancel()
        assert len(running(service, FRONT_END_MODULE)) == 2
        assert max(running(service, FRONT_END_MODULE)) not in before


def engine_folders(places: Path) -> set[str]:
    return {path.name for path in places.iterdir() if path.name.startswith("runahead-engine-")}


def test_a_killed_supervisor_leaves_no_process_and_no_folder(service: LocalService, places: Path) -> None:
    with stubs(service) as by_number, contextlib.ExitStack() as stack:
        call = opened(by_number[1], "a")
        children = [
            pid for module in (FRONT_END_MODULE, SIDE_MODULE, ENGINE_MODULE) for pid in running(service, module)
        ]
        assert len(children) == 4
        ends = [stack.enter_context(watched(process)) for process in children]
        before = engine_folders(places)
        service.process.kill()
        assert all(has_ended(end, END_S) for end in ends)
        assert code(failure(lambda: list(call))) == grpc.StatusCode.UNAVAILABLE
        assert len(before - engine_folders(places)) == 1, "a service that lasts keeps its folder"


def test_a_stopped_process_does_not_outlive_a_killed_supervisor(service: LocalService) -> None:
    stopped = [running(service, module)[0] for module in (ENGINE_MODULE, FRONT_END_MODULE, SIDE_MODULE)]
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(watched(process)) for process in stopped]
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        service.process.kill()
        assert all(has_ended(end, END_S) for end in ends)


STARTING = """
import sys, threading
import runahead.runtime.process.main as engine
def hang(*_):
    print("starts", flush=True)
    threading.Event().wait(300)
engine.assemble = hang
sys.exit(engine.main())
"""
PARENT = """
import os, signal, subprocess, sys
engine = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
engine.stdin.write(b'{"socket": "nowhere/engine", "parent": %d, "config": {"model": "m"}}\\n' % os.getpid())
engine.stdin.flush()
assert engine.stdout.readline() == b"starts\\n"
print(engine.pid, flush=True)
signal.pause()
"""


def test_an_engine_whose_start_hangs_does_not_outlive_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, STARTING], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        with watched(int(parent.stdout.readline())) as end:
            parent.kill()
            assert has_ended(end, END_S)


def test_an_engine_whose_parent_ended_before_it_began_ends() -> None:
    """While it still imported, when no signal could tell it."""
    orders = b'{"socket": "nowhere/engine", "parent": %d, "config": {"model": "m"}}\n' % (os.getpid() + 1)
    ended = subprocess.run([sys.executable, "-c", STARTING], input=orders, capture_output=True, timeout=60, check=False)
    assert ended.returncode == EXIT_CANNOT_START and not ended.stdout
    assert b"the engine's parent has ended before the engine began" in ended.stderr


def test_a_killed_engine_ends_the_streams_of_all_front_ends_once_and_then_the_service(service: LocalService) -> None:
    with stubs(service) as by_number:
        calls = [opened(stub, f"r{number}") for number, stub in by_number.items()]
        os.kill(engine_of(service), signal.SIGKILL)
        for call in calls:
            error = failure(lambda call=call: list(call))  # type: ignore[misc]
            assert code(error) == grpc.StatusCode.UNAVAILABLE
        assert service.process.wait(END_S) == 1
        assert running(service, FRONT_END_MODULE) == []


REFUSED = """
import sys
from runahead.service import cli
code = cli.main(["serve", "--port", "0", "--frontends", "2", "--context-length", "99999", *sys.argv[1:]])
print(code, sorted({"grpc", "torch"} & set(sys.modules)))
"""


BROKEN = """
import sys
from runahead.service.processes import {module}
from runahead.service.cli import main
def fail(*_):
    raise ZeroDivisionError("nobody expected it")
{target} = fail
sys.exit(main(["serve", "--port", "0", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    ("module", "target"),
    [("supervisor", "supervisor.process_figures"), ("children", "children.Keeper._end_of")],
    ids=["what takes stock", "what keeps a front end"],
)
def test_a_task_of_the_supervisor_that_fails_is_told_of_and_ends_the_service(module: str, target: str) -> None:
    script = BROKEN.format(module=module, target=target)
    with subprocess.Popen(
        [sys.executable, "-c", script, *QUICK, *BESIDE], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, said = process.communicate(timeout=END_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    events = [json.loads(line) for line in said.splitlines()]
    (failed,) = [event for event in events if event["event"] == "supervisor_failed"]
    assert "nobody expected it" in failed["exception"]
    assert {"shutting_down", "engine_ended"} < {event["event"] for event in events}, "its streams may finish"
    assert process.returncode == 1


def test_an_engine_that_ends_before_the_side_server_in_a_shutdown_is_nothing_to_warn_of(service: LocalService) -> None:
    (side,) = running(service, SIDE_MODULE)
    with watched(engine_of(service)) as engine:
        os.kill(side, signal.SIGSTOP)  # it ends after the engine then
        service.process.terminate()
        assert has_ended(engine, END_S)
        os.kill(side, signal.SIGCONT)
    assert service.process.wait(END_S) == 0
    assert b"warning" not in service.log.read_bytes()


def test_the_supervisor_loads_neither_grpc_nor_torch() -> None:
    command = [sys.executable, "-c", REFUSED, *BESIDE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "more than the model's" in done.stderr, "its engine was started, and has said why it is not"
    assert done.stdout == "2 []\n"


def test_a_second_service_on_the_port_is_refused_though_the_port_is_shared(lasting: LocalService) -> None:
    port = lasting.url.split(":")[1]
    for flags in (["--frontends", "2"], []):
        command = [sys.executable, "-m", "runahead", "serve", "--port", port, *BESIDE, *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)
        assert done.returncode == 2
        taken = f"runahead serve: 127.0.0.1 port {port} can't be listened on: Address already in use; "
        assert done.stderr == f"{taken}--port takes another number, or 0 for any free port\n"


def test_sigterm_drains_every_front_end_and_a_second_one_ends_the_grace(places: Path) -> None:
    with (
        two_front_ends("--shutdown-grace-s", "600") as service,
        stubs(service) as by_number,
        grpc.insecure_channel(service.url) as channel,
    ):
        watch = HealthStub(channel).Watch(HealthCheckRequest(service="runahead.v1.GenerationService"), timeout=60)
        assert next(watch).status == HealthCheckResponse.SERVING
        calls = [opened(stub, f"r{number}") for number, stub in by_number.items()]
        service.process.terminate()
        assert next(watch).status == HealthCheckResponse.NOT_SERVING
        for stub in by_number.values():
            until_refused(stub)
        for call in calls:
            assert next(call).WhichOneof("event") == "delta", "what is open goes on"
        service.process.terminate()
        for call in calls:
            error = failure(lambda call=call: list(call))  # type: ignore[misc]
            assert detail(error, error_details_pb2.ErrorInfo).reason == "SHUTDOWN"
        assert service.process.wait(END_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_every_process_is_a_drain_too(service: LocalService, number: signal.Signals) -> None:
    with stubs(service) as by_number:
        call = by_number[1].Generate(
            GenerateRequest(text="def f():\n", stopping=StoppingOptions(max_tokens=200, ignore_eos=True)), timeout=60
        )
        assert next(call).HasField("accepted")
        os.killpg(service.process.pid, number)
        assert last_event(call) == "finished"
        assert service.process.wait(END_S) == 0


def test_a_third_signal_ends_a_service_whose_front_ends_do_not(service: LocalService) -> None:
    stopped = running(service, FRONT_END_MODULE)
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(watched(process)) for process in stopped]
        for seen in (b"shutting_down", b"grace_ended", b"engine_ended"):  # two that come at once are one
            service.process.terminate()
            until_logged(service, seen)
        assert service.process.wait(END_S) == 1
        assert all(has_ended(end, END_S) for end in ends)


def test_a_signal_to_a_service_that_has_ended_all_leaves_its_exit_code(service: LocalService) -> None:
    service.process.terminate()
    until_logged(service, b"engine_ended")
    while service.process.poll() is None:  # at any moment of its end, and it has time to handle them
        service.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            service.process.wait(SIGNALS_S)
    assert service.process.wait(END_S) == 0
