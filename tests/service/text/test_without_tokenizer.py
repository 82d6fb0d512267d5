"""A checkpoint without a tokenizer, behind `--tokenizer none`: ids go in, ids come out, and text is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from tokenizers import decoders

from benchmarks.local_service import BESIDE, local_service
from runahead.service import cli
from runahead.v1 import (
    Delta,
    DetokenizeRequest,
    Finished,
    FinishReason,
    GenerateOnceRequest,
    GenerateRequest,
    GenerationServiceStub,
    GetModelInfoRequest,
    OutputOptions,
    SamplingOptions,
    StoppingOptions,
    TokenIds,
    TokenizeRequest,
)
from tests.runtime.models.checkpoints import CASES, save
from tests.runtime.models.test_model_config import RAW
from tests.service.rpc_errors import code, failure, fields, words
from tests.service.small_tokenizers import byte_level_tokenizer

TIMEOUT_S = 60.0
PROMPT = TokenIds(ids=[7, 3, 150, 3, 9])
GREEDY = SamplingOptions(temperature=0.0)
TOKENS = 12
FLAGS = ["--max-rows", "4", "--num-blocks", "64", "--threads", "1", "--no-request-log", "--vllm-facade"]
(LLAMA,) = (case for case in CASES if case.name == "llama")


@dataclass(frozen=True, slots=True)
class Served:
    """A service, and what transformers generates with the same weights after `PROMPT`."""

    url: str
    stub: GenerationServiceStub
    expected: list[int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    oracle = save(LLAMA, folder)
    with torch.inference_mode():
        ids = list(PROMPT.ids)
        for _ in range(TOKENS):
            ids.append(int(oracle(torch.tensor([ids])).logits[0, -1].argmax()))
    with (
        local_service(["--model", str(folder), "--tokenizer", "none", *FLAGS]) as service,
        grpc.insecure_channel(service.url) as channel,
    ):
        yield Served(service.url, GenerationServiceStub(channel), ids[len(PROMPT.ids) :])


def completion(stub: GenerationServiceStub, request: GenerateRequest) -> tuple[list[int], Finished]:
    """Ids of the completion and how it ended. Whatever comes has no text and no bytes."""
    ids: list[int] = []
    for response in stub.Generate(request, timeout=TIMEOUT_S):
        delta: Delta = response.delta
        assert delta.text == ""
        for token in (*delta.tokens, *response.prompt.tokens):
            assert token.bytes == b"" and all(top.bytes == b"" for top in token.top)
        ids += [token.id for token in delta.tokens]
    return ids, response.finished


def test_token_ids_get_the_tokens_of_transformers_without_text(served: Served) -> None:
    stopping = StoppingOptions(max_tokens=TOKENS, ignore_eos=True)
    request = GenerateRequest(
        token_ids=PROMPT, sampling=GREEDY, stopping=stopping, output=OutputOptions(logprobs=2, prompt_logprobs=1)
    )
    ids, finished = completion(served.stub, request)
    assert ids == served.expected
    assert finished.reason == FinishReason.FINISH_REASON_LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (len(PROMPT.ids), TOKENS)
    events = list(served.stub.Generate(request, timeout=TIMEOUT_S))
    prompt = [token for event in events for token in event.prompt.tokens]
    assert [token.id for token in prompt] == list(PROMPT.ids)
    assert [token.HasField("logprob") for token in prompt] == [False, True, True, True, True]
    generated = [token for event in events for token in event.delta.tokens]
    assert all(token.top[0].id == token.id and token.top[0].logprob == token.logprob for token in generated)


def test_a_whole_completion_has_ids_and_no_text(served: Served) -> None:
    request = GenerateOnceRequest(
        token_ids=PROMPT,
        sampling=GREEDY,
        stopping=StoppingOptions(max_tokens=TOKENS, ignore_eos=True),
        output=OutputOptions(prompt_logprobs=0),
    )
    whole = served.stub.GenerateOnce(request, timeout=TIMEOUT_S)
    assert whole.text == ""
    assert [token.id for token in whole.tokens] == served.expected
    assert [token.id for token in whole.prompt.tokens] == list(PROMPT.ids)


def test_a_stop_token_ends_a_completion_and_counts(served: Served) -> None:
    stop = served.expected[5]
    kept = served.expected[: served.expected.index(stop) + 1]
    stopping = StoppingOptions(max_tokens=TOKENS, ignore_eos=True, stop_token_ids=[stop])
    ids, finished = completion(served.stub, GenerateRequest(token_ids=PROMPT, sampling=GREEDY, stopping=stopping))
    assert ids == kept
    assert (finished.reason, finished.stop.token_id) == (FinishReason.FINISH_REASON_STOP, stop)
    assert finished.usage.completion_tokens == len(kept)


TEXT = {
    "text": GenerateRequest(text="def f():"),
    "stopping.stop": GenerateRequest(token_ids=PROMPT, stopping=StoppingOptions(stop=["\n"])),
    "stopping.include_stop": GenerateRequest(token_ids=PROMPT, stopping=StoppingOptions(include_stop=True)),
    "output.echo": GenerateRequest(token_ids=PROMPT, output=OutputOptions(echo=True)),
}


@pytest.mark.parametrize("field", TEXT)
def test_text_is_refused_by_its_field(served: Served, field: str) -> None:
    once = GenerateOnceRequest.FromString(TEXT[field].SerializeToString())
    for call in (
        lambda: list(served.stub.Generate(TEXT[field], timeout=TIMEOUT_S)),
        lambda: served.stub.GenerateOnce(once, timeout=TIMEOUT_S),
    ):
        error = failure(call)
        assert (code(error), fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
        assert words(error).startswith(
            f"{field} is not supported by this server, which was started without a tokenizer"
        )


def test_all_that_is_text_is_named_at_once_beside_what_else_is_wrong(served: Served) -> None:
    request = GenerateRequest(
        text="x", sampling=SamplingOptions(top_k=-1), stopping=StoppingOptions(stop=["y"], include_stop=True)
    )
    error = failure(lambda: list(served.stub.Generate(request, timeout=TIMEOUT_S)))
    assert fields(error) == ["text", "stopping.stop", "stopping.include_stop", "sampling.top_k"]


def test_text_that_is_switched_off_is_no_text(served: Served) -> None:
    request = GenerateRequest(
        token_ids=PROMPT,
        stopping=StoppingOptions(max_tokens=1, include_stop=False),
        output=OutputOptions(echo=False),
    )
    ids, _ = completion(served.stub, request)
    assert len(ids) == 1


def test_tokenize_and_detokenize_fail_for_want_of_a_tokenizer(served: Served) -> None:
    for call in (
        lambda: served.stub.Tokenize(TokenizeRequest(text="x"), timeout=TIMEOUT_S),
        lambda: served.stub.Detokenize(DetokenizeRequest(token_ids=[1]), timeout=TIMEOUT_S),
    ):
        error = failure(call)
        assert code(error) == grpc.StatusCode.FAILED_PRECONDITION
        assert "started without a tokenizer" in words(error)


def test_model_info_says_that_there_is_no_tokenizer(served: Served) -> None:
    info = served.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
    assert not info.has_tokenizer
    assert not info.special_tokens and not info.HasField("chat_template")
    limits = info.limits
    assert (limits.prompt_text_bytes, limits.stop_strings, limits.stop_string_bytes) == (0, 0, 0)
    assert limits.prompt_tokens == info.context_length - 1


def test_the_command_line_prints_ids_and_says_why_text_is_refused(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", served.url, "--temperature", "0", "--ignore-eos", "--max-tokens", str(TOKENS)]
    ids = ",".join(map(str, PROMPT.ids))
    assert cli.main(["generate", "--token-ids", ids, *flags]) == 0
    assert capsys.readouterr().out.split() == [str(token_id) for token_id in served.expected]
    assert cli.main(["generate", "def f():", *flags]) == 1
    assert "INVALID_ARGUMENT: text is not supported by this server" in capsys.readouterr().err


def test_the_same_checkpoint_is_not_started_without_being_told_so(served: Served, folder: Path) -> None:
    command = [sys.executable, "-m", "runahead", "serve", "--model", str(folder), "--port", "0", *BESIDE, *FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("--tokenizer none serves it for token ids only\n")


def test_a_tokenizer_that_is_not_supported_is_not_looked_at(tmp_path: Path) -> None:
    save(LLAMA, tmp_path)
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    flags = ["--model", str(tmp_path), "--load-format", "dummy", "--tokenizer", "none", *FLAGS]
    with local_service(flags) as service, grpc.insecure_channel(service.url) as channel:
        stub = GenerationServiceStub(channel)
        assert not stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S).HasField("chat_template")
        stopping = StoppingOptions(max_tokens=3, ignore_eos=True)
        ids, _ = completion(stub, GenerateRequest(token_ids=PROMPT, stopping=stopping))
        assert len(ids) == 3


def test_random_weights_need_no_more_than_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW), encoding="utf-8")
    with (
        local_service(["--model", str(tmp_path), "--load-format", "dummy", *FLAGS]) as service,
        grpc.insecure_channel(service.url) as channel,
    ):
        stub = GenerationServiceStub(channel)
        info = stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
        assert (info.vocab_size, info.has_tokenizer) == (RAW["vocab_size"], False)
        stopping = StoppingOptions(max_tokens=TOKENS, ignore_eos=True)
        ids, finished = completion(stub, GenerateRequest(token_ids=PROMPT, sampling=GREEDY, stopping=stopping))
        assert (len(ids), finished.reason) == (TOKENS, FinishReason.FINISH_REASON_LENGTH)
        error = failure(lambda: list(stub.Generate(GenerateRequest(text="def f():"), timeout=TIMEOUT_S)))
        assert (code(error), fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["text"])
        assert "no_tokenizer" in service.log.read_text(encoding="utf-8")


def test_random_weights_keep_the_tokenizer_that_lies_beside_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW), encoding="utf-8")
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with (
        local_service(["--model", str(tmp_path), "--load-format", "dummy", *FLAGS]) as service,
        grpc.insecure_channel(service.url) as channel,
    ):
        assert GenerationServiceStub(channel).GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S).has_tokenizer


def test_a_router_gets_no_tokenizer_and_is_told_why(served: Served) -> None:
    with grpc.insecure_channel(served.url) as channel:
        asked = vllm_engine_pb2_grpc.VllmEngineStub(channel).GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=5)
        error = failure(lambda: list(asked))
    assert code(error) == grpc.StatusCode.FAILED_PRECONDITION
    assert "started without a tokenizer" in words(error)
