"""Calls of a real router, byte for byte as SMG 1.13.0 has sent them: each is answered, or refused by its name.

`router_calls.json` has the router's requests for calls of the OpenAI client, one of each kind. docs/routers.md says how
they were recorded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from benchmarks.local_service import LocalService, local_service
from runahead.runtime.checkpoint import BUNDLED_FOLDER
from runahead.v1 import GenerationServiceStub, StatsRequest
from tests.service.rpc_errors import code, failure, words

TIMEOUT_S: Final = 60.0
CALLS: Final[dict[str, dict[str, str]]] = {
    call["what"]: call for call in json.loads(Path(__file__).with_name("router_calls.json").read_text())
}
# By what was asked: words of the refusal.
REFUSED: Final = {
    "no tokens": "sampling_params.max_tokens must be 1 to",
    "too many tokens": "sampling_params.max_tokens must be 1 to",
    "a broken regex": "sampling_params.regex can't be compiled",
    "a schema that is not enforced": "sampling_params.json_schema#/not is a keyword that is not enforced",
    "special tokens beside a stop string": "sampling_params.skip_special_tokens must be set together with stop",
}
NOT_SERVED: Final = {"events", "embedding"}
COMPLETED: Final = sorted(
    name for name, call in CALLS.items() if call["method"] == "Generate" and name not in REFUSED and name[:2] != "an"
)
OBJECT: Final = re.compile(r'\{\s*"a"\s*:\s*-?\d+\s*,\s*"b"\s*:\s*(true|false)\s*\}')


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    with local_service(["--vllm-facade", "--threads", "1", "--max-rows", "8", "--num-blocks", "400"]) as started:
        yield started


@pytest.fixture
def channel(service: LocalService) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service.url) as channel:
        yield channel


def sent(channel: grpc.Channel, what: str) -> Any:
    """The call with the bytes that the router sent, and its answers as bytes."""
    call = CALLS[what]
    method: Any = channel.unary_stream(f"/vllm.grpc.engine.VllmEngine/{call['method']}")
    return method(bytes.fromhex(call["request"]), timeout=TIMEOUT_S)


def completed(channel: grpc.Channel, what: str) -> list[Any]:
    return [pb.GenerateResponse.FromString(answer) for answer in sent(channel, what)]


def text_of(answers: list[Any]) -> str:
    """The text of a completion, by the bundled model's tokenizer."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_FOLDER / "tokenizer.json"))
    return str(tokenizer.decode(list(answers[-1].complete.output_ids)))


@pytest.mark.parametrize("what", COMPLETED)
def test_a_completion_that_a_router_asks_for_is_answered(channel: grpc.Channel, what: str) -> None:
    answers = completed(channel, what)
    end = answers[-1].complete
    assert end.finish_reason in ("stop", "length") and end.prompt_tokens in (5, 12)
    streamed = [token for answer in answers[:-1] for token in answer.chunk.token_ids]
    assert len(answers) == 1 or streamed == list(end.output_ids)
    asked = pb.GenerateRequest.FromString(bytes.fromhex(CALLS[what]["request"]))
    assert asked.stream == (len(answers) > 1)
    assert 0 < end.completion_tokens <= asked.sampling_params.max_tokens
    if asked.sampling_params.HasField("logprobs"):
        scored = [answer.chunk.output_logprobs for answer in answers[:-1]] or [end.output_logprobs]
        assert sum(len(each.token_logprobs) for each in scored) == end.completion_tokens
        assert all(len(top.token_ids) == 2 for each in scored for top in each.top_logprobs)


def test_what_a_router_asks_of_a_text_holds(channel: grpc.Channel) -> None:
    assert text_of(completed(channel, "regex")) == "aaab"
    answers = completed(channel, "ebnf")  # of a random seed
    is_cut = answers[-1].complete.finish_reason == "length"
    assert re.fullmatch("(no)*(n|y|ye)?" if is_cut else "(no)*yes", text_of(answers))
    for what, expected in {"json_schema": OBJECT, "a named tool": OBJECT}.items():
        answers = completed(channel, what)
        assert answers[-1].complete.finish_reason == "length" or expected.fullmatch(text_of(answers))


def test_a_seed_that_a_router_sends_gives_the_same_tokens(channel: grpc.Channel) -> None:
    first, second = (list(completed(channel, "seed")[-1].complete.output_ids) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_a_router_asks_for_and_is_not_served_is_refused_by_its_name(channel: grpc.Channel, what: str) -> None:
    error = failure(lambda: list(sent(channel, what)))
    assert code(error) == grpc.StatusCode.INVALID_ARGUMENT and words(error).startswith(REFUSED[what])


@pytest.mark.parametrize("what", sorted(NOT_SERVED))
def test_a_method_that_a_router_tries_and_is_not_served_is_not_there(channel: grpc.Channel, what: str) -> None:
    assert code(failure(lambda: list(sent(channel, what)))) == grpc.StatusCode.UNIMPLEMENTED


def test_what_a_router_asks_of_the_server_is_answered_and_no_refusal(channel: grpc.Channel) -> None:
    before = dict(GenerationServiceStub(channel).Stats(StatsRequest(), timeout=TIMEOUT_S).stats.refusals)
    (health,) = sent(channel, "health")
    assert pb.HealthCheckResponse.FromString(health).healthy
    (model,) = sent(channel, "model")
    assert pb.GetModelInfoResponse.FromString(model).served_model_name == "bundled"
    (server,) = sent(channel, "server")
    assert pb.GetServerInfoResponse.FromString(server).max_num_seqs == 8
    (loads,) = sent(channel, "loads")
    assert pb.GetLoadsResponse.FromString(loads).loads[0].max_running_requests == 8
    parts = [common_pb2.GetTokenizerChunk.FromString(part) for part in sent(channel, "tokenizer")]
    assert parts[-1].sha256 == sha256(b"".join(part.data for part in parts)).hexdigest()
    after = GenerationServiceStub(channel).Stats(StatsRequest(), timeout=TIMEOUT_S).stats.refusals
    assert dict(after) == before


def test_a_stream_that_a_router_aborts_ends(channel: grpc.Channel) -> None:
    stream = sent(channel, "an endless stream")
    assert pb.GenerateResponse.FromString(next(stream)).chunk.token_ids
    assert [pb.AbortResponse.FromString(answer) for answer in sent(channel, "abort")] == [pb.AbortResponse()]
    assert pb.GenerateResponse.FromString(list(stream)[-1]).complete.finish_reason == "abort"
