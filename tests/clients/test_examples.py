"""Each example does what it says, against a whole service."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from runahead.v1 import (
    FinishReason,
    GenerateOnceRequest,
    GenerateRequest,
    GenerationServiceStub,
    SamplingOptions,
    StoppingOptions,
)
from tests.clients.refusing_server import RefusingServer
from tests.clients.toolchains import CLIENTS, Program
from tests.project.repository import ROOT
from tests.service.fake_engine import FakeEngine
from tests.service.running_service import Service

pytestmark = pytest.mark.timeout(600)  # the first test of an example makes it, which takes a compiler long

TIMEOUT_S = 60.0
SOURCES = {
    "python": "python/generate.py",
    "node": "node/generate.ts",
    "cpp": "cpp/generate.cc",
    "go": "go/main.go",
    "java": "java/Generate.java",
}


@pytest.fixture(scope="module")
def printed(stub: GenerationServiceStub) -> str:
    """What every example prints: the text that the same request has from here, and how the rest must end."""
    request = GenerateOnceRequest(
        text="def read_lines(path):\n",
        sampling=SamplingOptions(temperature=0),
        stopping=StoppingOptions(max_tokens=32),
    )
    once = stub.GenerateOnce(request, timeout=TIMEOUT_S)
    system, user = "Answer in one sentence.", "How does Python read the lines of a file?"
    asked = GenerateOnceRequest(
        text=f"# system: {system}\n# user: {user}\n# answer:",
        add_special_tokens=False,
        sampling=SamplingOptions(temperature=0),
        stopping=StoppingOptions(max_tokens=32),
    )
    answer = stub.GenerateOnce(asked, timeout=TIMEOUT_S)
    ended, tokens = FinishReason.Name(answer.finished.reason), answer.finished.usage.completion_tokens
    sentence = "stopping.max_tokens must be 1 to 1048576, and is 0"
    return (
        f"{once.text}\n"
        "finished: FINISH_REASON_LENGTH, 32 tokens\n"
        f"{answer.text}\n"
        f"finished: {ended}, {tokens} tokens\n"
        "abort: ABORT_OUTCOME_ABORTED\n"
        "finished: FINISH_REASON_ABORTED\n"
        f"refused: INVALID_ARGUMENT: {sentence}\n"
        "  reason INVALID_FIELD of runahead\n"
        f"  field stopping.max_tokens: {sentence}\n"
    )


def test_an_example_streams_aborts_and_reads_a_refusal(example: Program, address: str, printed: str) -> None:
    done = example.run(address)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_an_example_calls_through_tls_with_a_token(
    example: Program, secured: tuple[str, Path, Path], printed: str
) -> None:
    done = example.run(*secured)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_an_example_whose_model_has_no_chat_template_says_so_and_goes_on(
    example: Program, without_chat_template: str
) -> None:
    done = example.run(without_chat_template)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    reason, aborted = lines.index("  reason NO_CHAT_TEMPLATE of runahead"), lines.index("abort: ABORT_OUTCOME_ABORTED")
    assert reason < aborted and lines[reason - 1].startswith("refused: FAILED_PRECONDITION: this server takes no chat")


def test_an_example_with_a_wrong_token_says_so(
    example: Program, secured: tuple[str, Path, Path], tmp_path: Path
) -> None:
    address, authority, _ = secured
    (token := tmp_path / "token").write_text("somebody else's token\n")
    done = example.run(address, authority, token)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("refused: UNAUTHENTICATED: ")
    assert "  reason UNKNOWN_CREDENTIALS of runahead\n" in done.stdout


def test_an_example_without_a_place_says_when_to_come_back(example: Program, tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with Service(FakeEngine(path), path, max_streams=1) as service:
        open_stream = service.stub.Generate(GenerateRequest(text="x"), timeout=TIMEOUT_S)
        service.engine.next_submit()  # it has the only place, and its engine says nothing of it
        done = example.run(f"127.0.0.1:{service.port}")
        open_stream.cancel()
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("refused: RESOURCE_EXHAUSTED: ")
    assert re.search(r"^  reason \w+ of runahead$", done.stdout, re.MULTILINE)
    assert re.search(r"^  try again in [1-9]\d*\.\d s$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize(
    ("code", "attempts"),
    [(grpc.StatusCode.UNAVAILABLE, 4), (grpc.StatusCode.RESOURCE_EXHAUSTED, 1), (grpc.StatusCode.INTERNAL, 1)],
    ids=["unavailable", "exhausted", "internal"],
)
def test_an_example_tries_again_after_unavailable_alone(example: Program, code: grpc.StatusCode, attempts: int) -> None:
    with RefusingServer(code) as server:
        done = example.run(server.address)
    assert done.returncode == 1, done.stderr
    first = done.stdout.splitlines()[0]  # some libraries put words of theirs before the server's
    assert first.startswith(f"refused: {code.name}: ") and first.endswith("as it always does")
    tried = [attempt["method"] for attempt in server.attempts]
    assert tried == ["/runahead.v1.GenerationService/Generate"] * attempts


def words(service_config: str) -> list[str]:
    """Names, strings and numbers of a service config, in whichever language it is written."""
    found = re.findall(r"[A-Za-z_][\w.]*|\d[\d.]*s?", re.sub(r"\b(Map|List)\.of\b", "", service_config))
    return [re.sub(r"^(\d+)\.0$", r"\1", word) for word in found]


@pytest.mark.parametrize("language", SOURCES)
def test_the_service_config_of_every_example_is_that_of_the_readme(language: str) -> None:
    (block,) = re.findall(r"^```json\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    source = (CLIENTS / SOURCES[language]).read_text(encoding="utf-8")
    (config,) = re.findall(r'(["\w]*loadBalancingConfig.*?UNAVAILABLE["\w])', source, re.DOTALL)
    assert "round_robin" in words(block)
    assert words(config) == words(block)
