"""`runahead bench`: the requests of a seed, what is made of their outcomes, and a run against a real service."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from runahead.service import cli
from runahead.service.commands.bench import calls
from runahead.service.commands.bench.calls import Lengths, Outcome, Planned, planned
from runahead.service.commands.bench.figures import Figures, Goal, figures, head, row
from runahead.v1 import generate_pb2, generation_service_pb2_grpc, model_pb2

GOAL = Goal(first_token_ms=200, token_ms=25)
PROMPTS, ANSWERS = Lengths(400, 0.7), Lengths(125, 0.7)


def plan(rate: float, count: int = 400, seed: int = 77, context: int = 4096) -> list[Planned]:
    return planned(rate, count, PROMPTS, ANSWERS, vocab=1000, context=context, seed=seed)


# ------------------------------------------------------------ what is sent


def test_a_seed_gives_the_same_requests_at_every_rate_and_another_seed_others() -> None:
    slow, fast, other = plan(2.0), plan(8.0), plan(2.0, seed=78)
    assert [(each.prompt, each.max_tokens) for each in slow] == [(each.prompt, each.max_tokens) for each in fast]
    assert [each.due_s for each in slow] == pytest.approx([4 * each.due_s for each in fast])
    assert slow[0].prompt != other[0].prompt
    assert slow[-1].due_s == pytest.approx(400 / 2, rel=0.2)


def test_with_rate_0_all_are_due_at_once() -> None:
    assert {each.due_s for each in plan(0)} == {0.0}


def test_lengths_are_around_their_median_within_bounds_and_the_context() -> None:
    found = plan(1.0)
    prompts, answers = [len(each.prompt) for each in found], [each.max_tokens for each in found]
    assert statistics.median(prompts) == pytest.approx(400, rel=0.15)
    assert statistics.median(answers) == pytest.approx(125, rel=0.15)
    assert min(prompts) >= 400 // 12 and max(prompts) <= 2000 and max(answers) <= 625
    assert all(0 <= token < 1000 for each in found for token in each.prompt)
    assert all(len(each.prompt) + each.max_tokens <= 300 for each in plan(1.0, context=300))
    assert all(each.prompt and each.max_tokens for each in plan(1.0, context=2))
    assert {len(each.prompt) for each in planned(1, 9, Lengths(7, 0), Lengths(3, 0), vocab=5, context=99, seed=1)} == {
        7
    }


# ------------------------------------------------------------ what is made of it


def outcome(first: float | None, end: float, tokens: int, failure: str = "", gaps: tuple[float, ...] = ()) -> Outcome:
    return Outcome(
        wanted=10, first_token_s=first, end_s=end, tokens=tokens, gaps_s=list(gaps), failure=failure, late_s=0.001
    )


def test_figures_of_a_run() -> None:
    outcomes = [
        outcome(0.1, 0.2, 11, gaps=(0.01, 0.03)),  # good: 10 ms a token
        outcome(0.3, 0.4, 11, gaps=(0.02,)),  # its first token is late
        outcome(0.1, 1.1, 11),  # 100 ms a token
        outcome(0.1, 0.15, 2, failure="UNAVAILABLE: gone"),
    ]
    assert figures(4.0, outcomes, 2.0, GOAL) == Figures(
        rate=4.0, requests=4, failed=1, failure="UNAVAILABLE: gone", tokens=35, wanted_tokens=40, seconds=2.0,
        tokens_per_s=17.5, first_token_ms_p50=100.0, first_token_ms_p99=300.0, gap_ms_p50=20.0, gap_ms_p99=30.0,
        gap_ms_max=30.0, token_ms_mean=42.5, good=0.25, good_per_s=0.5, late_ms_p99=1.0,
    )  # fmt: skip


def test_a_run_in_which_nothing_came_has_no_times() -> None:
    found = figures(1.0, [outcome(None, 0.1, 0, failure="RESOURCE_EXHAUSTED: full")], 0.1, GOAL)
    assert found.first_token_ms_p50 is found.gap_ms_max is found.token_ms_mean is None
    assert (found.good, found.failed) == (0.0, 1)
    assert " - " in row(found)


def test_a_request_of_one_token_is_good_by_its_first_alone() -> None:
    assert GOAL.is_met(outcome(0.1, 0.9, 1))
    assert not GOAL.is_met(outcome(None, 0.1, 0))


def test_a_row_of_the_table_stands_under_its_heads() -> None:
    line = row(figures(4.0, [outcome(0.1, 0.2, 11, gaps=(0.01,))], 2.0, GOAL))
    assert len(line) == len(head())
    assert line.split() == ["4", "1", "0", "6", "100.0", "100.0", "10.0", "10.0", "10.0", "10.0", "100.0", "0.50"]


# ------------------------------------------------------------ a run


class Scripted(generation_service_pb2_grpc.GenerationServiceServicer):
    """Answers each request with as many tokens as it asks for, two a message; each third is refused."""

    def __init__(self) -> None:
        self.asked: list[generate_pb2.GenerateRequest] = []

    def GetModelInfo(self, request: object, context: object) -> model_pb2.GetModelInfoResponse:
        return model_pb2.GetModelInfoResponse(model="scripted", vocab_size=50, context_length=64)

    def Generate(
        self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generate_pb2.GenerateResponse]:
        self.asked.append(request)
        if len(self.asked) % 3 == 0:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        yield generate_pb2.GenerateResponse(accepted=generate_pb2.Accepted())
        left = request.stopping.max_tokens
        while left:
            now = min(2, left)
            left -= now
            tokens = [generate_pb2.Token(id=1)] * now
            yield generate_pb2.GenerateResponse(delta=generate_pb2.Delta(tokens=tokens))
        yield generate_pb2.GenerateResponse(finished=generate_pb2.Finished())


@pytest.fixture
def service() -> Iterator[tuple[Scripted, str]]:
    scripted, server = Scripted(), grpc.server(ThreadPoolExecutor(1))
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield scripted, f"127.0.0.1:{port}"
    server.stop(None).wait()


FLAGS = ("--requests", "6", "--prompt-tokens", "20", "--output-tokens", "9")


def test_a_run_a_rate_is_printed_as_json_and_counts_what_was_refused(
    service: tuple[Scripted, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted, url = service
    assert cli.main(["bench", "--url", url, "--rate", "0,200", *FLAGS, "--json"]) == 0
    runs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [run["rate"] for run in runs] == [0, 200]
    for run in runs:
        assert (run["requests"], run["failed"]) == (6, 2)
        assert run["failure"] == "RESOURCE_EXHAUSTED: the queue is full"
        assert 0 < run["tokens"] < run["wanted_tokens"]
        assert run["first_token_ms_p50"] > 0 and run["gap_ms_max"] > 0
    assert all(request.stopping.ignore_eos and request.sampling.temperature == 0 for request in scripted.asked)
    assert all(max(request.token_ids.ids) < 50 for request in scripted.asked)


def test_times_count_from_when_a_request_was_due_and_a_client_that_is_late_says_so(
    service: tuple[Scripted, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_OVER_S", -3.0)  # every request was due 3 s ago
    assert cli.main(["bench", "--url", service[1], "--rate", "0", *FLAGS, "--json"]) == 0
    printed = capsys.readouterr()
    run = json.loads(printed.out)
    assert run["late_ms_p99"] >= 3000 and run["first_token_ms_p50"] >= 3000 and run["good"] == 0
    assert "ms late: this client is the limit" in printed.err


def test_the_table_has_a_line_a_run(service: tuple[Scripted, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--url", service[1], "--rate", "0,300", *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{service[1]}: scripted, 6 requests a run"
    assert lines[1] == head()
    assert [line.split()[:3] for line in (lines[2], lines[4])] == [["0", "6", "2"], ["300", "6", "2"]]
    assert lines[3] == "  2 failed, the first with RESOURCE_EXHAUSTED: the queue is full"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--rate", "fast"], "--rate must be a number from 0 to 1000000, and is 'fast'"),
        (["--rate", "1,nan"], "--rate must be a number from 0 to 1000000, and is 'nan'"),
        (["--requests", "0"], "--requests must be a whole number from 1 to 1000000, and is '0'"),
        (["--spread", "-1"], "--spread must be a number from 0 to 5, and is '-1'"),
        (["--cert", "c"], "--cert and --key go together"),
    ],
)
def test_a_flag_that_can_not_be_is_named(flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_a_service_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--url", "127.0.0.1:1"]) == 1
    assert "runahead bench: no server answers at 127.0.0.1:1" in capsys.readouterr().err
