"""The real service on the bundled model, which two processes have between them: what it says, and what becomes of it
when one of them is killed or stopped."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from benchmarks.local_service import LocalService, started_service
from runahead.runtime.process.rank_processes import COMMAND
from runahead.runtime.wire.parameters import SamplingParams
from runahead.service.settings.server_config import EXIT_ENGINE_LOST
from runahead.v1 import (
    GenerateOnceRequest,
    GenerateOnceResponse,
    GenerationServiceStub,
    GetModelInfoRequest,
    OutputOptions,
    SamplingOptions,
    StatsRequest,
    StoppingOptions,
    Structure,
    TokenIds,
    TraceRequest,
)
from tests.gpu.divided_models import DRAFTED, DRAWN, NAMES, saved
from tests.runtime.ranks.rank_engines import life
from tests.service.service_processes import check_failed_once, engine_of, has_ended, open_streams, running, watched

RANK_MODULE = COMMAND[-1]
BUNDLED = Path("runtime/models/bundled")
END_S = 60.0
STOPPED_S = 1.0
FLAGS = ["--tensor-parallel", "2", "--threads", "1", "--num-blocks", "600"]
PROMPTS = [[(37 * i + 11 * j) % 4000 + 2 for j in range(length)] for i, length in enumerate((5, 40, 17))]
TOKENS = 24


@pytest.fixture
def service() -> Iterator[LocalService]:
    with started_service([*FLAGS, "--launch-timeout-s", "4"]) as started:
        yield started


@pytest.fixture
def patient_service() -> Iterator[LocalService]:
    """A launch may take minutes."""
    with started_service(FLAGS) as started:
        yield started


def rank_of(service: LocalService) -> int:
    """The process id of rank 1."""
    (found,) = running(service, RANK_MODULE)
    return found


def ns(duration: Duration) -> int:
    return duration.ToNanoseconds()


def answers(service: LocalService) -> list[GenerateOnceResponse]:
    """A greedy completion, and two that are drawn, with log-probabilities."""
    with grpc.insecure_channel(service.url) as channel:
        stub = GenerationServiceStub(channel)
        waiting = [
            stub.GenerateOnce.future(
                GenerateOnceRequest(
                    token_ids=TokenIds(ids=prompt),
                    sampling=SamplingOptions(temperature=0.8 * (place > 0), seed=place),
                    stopping=StoppingOptions(max_tokens=TOKENS, ignore_eos=True),
                    output=OutputOptions(logprobs=0),
                ),
                timeout=60,
            )
            for place, prompt in enumerate(PROMPTS)
        ]
        return [call.result() for call in waiting]


def tokens_of(answers: list[GenerateOnceResponse]) -> list[list[int]]:
    return [[token.id for token in answer.tokens] for answer in answers]


def expected_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[list[int]]:
    """The tokens of two segments in one process."""
    oracle = life(folder, 0, monkeypatch, segments=2, num_blocks=120, **settings)
    for place, prompt in enumerate(PROMPTS):
        oracle.ask(place, prompt, TOKENS, SamplingParams(temperature=0.8 * (place > 0), seed=place, logprobs=0))
    oracle.run()
    oracle.close()
    said = oracle.said()
    return [said[place].tokens for place in range(len(PROMPTS))]


@pytest.mark.parametrize("name", [name for name in NAMES[1:] if name != DRAFTED])
def test_two_processes_serve_models_with_experts_and_recurrent_states(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(name, tmp_path)
    load_format = "dummy" if name in DRAWN else "auto"
    with started_service([*FLAGS, "--model", str(tmp_path), "--load-format", load_format]) as service:
        assert tokens_of(answers(service)) == expected_of(tmp_path, monkeypatch, load_format=load_format)


def test_two_processes_serve_with_a_draft_head_what_they_serve_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with started_service([*FLAGS, "--drafter", "eagle", "--draft-tokens", "3"]) as service:
        assert tokens_of(answers(service)) == expected_of(BUNDLED, monkeypatch)
        with grpc.insecure_channel(service.url) as channel:
            stats = GenerationServiceStub(channel).Stats(StatsRequest(), timeout=60).stats
        assert sum(stats.tokens.drafted.values()) > sum(stats.tokens.accepted.values()) > 0


def test_two_processes_serve_the_tokens_of_segments_in_one_process(
    patient_service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they go on where one of them was stopped for less than the bound."""
    expected = expected_of(BUNDLED, monkeypatch)
    found = answers(patient_service)
    assert tokens_of(found) == expected
    with grpc.insecure_channel(patient_service.url) as channel:
        stub = GenerationServiceStub(channel)
        assert stub.GetModelInfo(GetModelInfoRequest(), timeout=60).engine.tensor_parallel == 2
        calls = open_streams(channel, max_tokens=120)
        os.kill(rank_of(patient_service), signal.SIGSTOP)
        with contextlib.suppress(ValueError):  # nothing comes while it is stopped
            signal.sigtimedwait([], STOPPED_S)
        os.kill(rank_of(patient_service), signal.SIGCONT)
        assert [list(call)[-1].WhichOneof("event") for call in calls] == ["finished"] * len(calls)
        waits = stub.Stats(StatsRequest(), timeout=60).stats.chain.rank_wait_s
        assert sorted(waits) == [0, 1]
        assert waits[0] > STOPPED_S / 2, "rank 0 has waited for the stopped one"
        for launch in stub.Trace(TraceRequest(), timeout=60).launches:
            (other,) = launch.other_ranks
            assert ns(launch.launch.begin) < ns(other.begin) < ns(other.end)
        structured = GenerateOnceRequest(
            text="x", structure=Structure(regex="[ab]{7}"), stopping=StoppingOptions(max_tokens=20)
        )
        text = stub.GenerateOnce(structured, timeout=60).text
        assert len(text) == 7 and set(text) <= {"a", "b"}
    again = answers(patient_service)
    assert tokens_of(again) == expected
    logprobs = [[token.logprob for token in answer.tokens] for answer in found]
    assert [[token.logprob for token in answer.tokens] for answer in again] == logprobs
    patient_service.process.send_signal(signal.SIGTERM)
    assert patient_service.process.wait(END_S) == 0
    assert running(patient_service, RANK_MODULE) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_ends_every_stream_once_and_then_the_server(
    service: LocalService, number: signal.Signals
) -> None:
    """No process is left, not the one that is stopped either, and no shared memory."""
    before = set(Path("/dev/shm").iterdir())
    with grpc.insecure_channel(service.url) as channel, contextlib.ExitStack() as stack:
        calls = open_streams(channel)
        ends = [stack.enter_context(watched(process)) for process in (engine_of(service), rank_of(service))]
        os.kill(rank_of(service), number)
        check_failed_once(calls)
        assert service.process.wait(END_S) == EXIT_ENGINE_LOST
        assert all(has_ended(end, END_S) for end in ends)
    log = service.log.read_text()
    assert ("rank 1 has ended (signal SIGKILL)" in log) == (number == signal.SIGKILL)
    # Of a stopped rank the watchdog tells, or the rank that waited for it, whichever bound ends first.
    assert "launch_hung" in log or "device_failed" in log
    assert set(Path("/dev/shm").iterdir()) <= before


def test_ranks_end_with_an_engine_that_is_killed(service: LocalService) -> None:
    with watched(rank_of(service)) as end:
        os.kill(rank_of(service), signal.SIGSTOP)  # so that it does not see the end of its input
        os.kill(engine_of(service), signal.SIGKILL)
        assert has_ended(end, END_S)
    assert service.process.wait(END_S) == EXIT_ENGINE_LOST
