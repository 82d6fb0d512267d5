"""What routers are answered by the facade; and all that holds for our own service holds there."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import ConfigError
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.calls.admission import RIGHTS_FOR
from runahead.service.settings.server_config import check_extras
from runahead.service.settings.settings import FrontEndSettings, flag_of
from runahead.v1 import StatsRequest
from tests.service.fake_engine import INFO, STATS, TIMEOUT_S, FakeEngine
from tests.service.log_lines import log_lines
from tests.service.rpc_errors import code, detail, failure, fields, words
from tests.service.running_service import Service
from tests.service.vllm_calls import ALICE, ALL, BOB, SERVED, SERVICE, bearer, generate, ids, request, served, stub


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with served(tmp_path) as running:
        yield running


# ------------------------------------------------------------ what is answered


def test_a_stream_is_chunks_and_then_the_whole(service: Service) -> None:
    call = generate(service, request(logprobs=1, prompt_logprobs=1))
    handle = service.engine.next_submit().handle
    service.engine.send(m.Admitted(handle, 2, 0.5))
    service.engine.prompt_logprobs(handle, 1, [-1.5, -2.5], [[7], [8]], [[-0.5], [-1.0]])
    service.engine.output(handle, [5], logprobs=[m.Logprobs(0, -0.25, (5,), (-0.25,))])
    first = next(call).chunk
    assert (list(first.token_ids), first.prompt_tokens, first.completion_tokens, first.cached_tokens) == ([5], 3, 1, 2)
    assert list(first.output_logprobs.token_logprobs) == [-0.25] and list(first.output_logprobs.token_ids) == [5]
    assert [list(top.token_ids) for top in first.output_logprobs.top_logprobs] == [[5]]
    prompt = first.input_logprobs
    assert list(prompt.token_ids) == [1, 2, 3]
    assert [value.HasField("value") for value in prompt.token_logprobs] == [False, True, True]
    assert [value.value for value in prompt.token_logprobs][1:] == [-1.5, -2.5]
    assert [list(top.token_ids) for top in prompt.top_logprobs] == [[], [7], [8]]
    last = [m.Logprobs(0, -0.5, (6,), (-0.5,))]
    service.engine.output(handle, [6], FinishReason.LENGTH, logprobs=last, cached_tokens=2)
    second, end = list(call)
    assert list(second.chunk.token_ids) == [6] and not second.chunk.HasField("input_logprobs")
    whole = end.complete
    assert (list(whole.output_ids), whole.finish_reason) == ([5, 6], "length")
    assert (whole.prompt_tokens, whole.completion_tokens, whole.cached_tokens) == (3, 2, 2)
    assert not whole.HasField("input_logprobs") and not whole.HasField("output_logprobs")


def test_what_is_not_streamed_is_one_message(service: Service) -> None:
    call = generate(service, request(stream=False, logprobs=0, prompt_logprobs=0))
    handle = service.engine.next_submit().handle
    service.engine.prompt_logprobs(handle, 1, [-1.5, -2.5])
    service.engine.output(handle, [5], logprobs=[m.Logprobs(0, -0.25, (), ())])
    service.engine.output(handle, [6], FinishReason.LENGTH, logprobs=[m.Logprobs(0, -0.5, (), ())])
    (only,) = list(call)
    whole = only.complete
    assert list(whole.output_ids) == list(whole.output_logprobs.token_ids) == [5, 6]
    assert list(whole.output_logprobs.token_logprobs) == [-0.25, -0.5] and not whole.output_logprobs.top_logprobs
    assert len(whole.input_logprobs.token_ids) == 3


def test_completions_of_one_prompt_have_their_indexes(service: Service) -> None:
    call = generate(service, request(n=2, seed=7, logprobs=0, prompt_logprobs=0))
    submit = service.engine.next_submit()
    assert (submit.n, submit.sampling.seed) == (2, 7)
    service.engine.send(m.Admitted(submit.handle, 0, 0.5))
    service.engine.prompt_logprobs(submit.handle, 1, [-1.5, -2.5])
    service.engine.send(m.Admitted(submit.handle + 1, 2, 0.5))
    logprobs = [m.Logprobs(0, -0.25, (), ())]
    service.engine.output(submit.handle + 1, [6], FinishReason.LENGTH, logprobs=logprobs, cached_tokens=2)
    service.engine.output(submit.handle, [5], FinishReason.LENGTH, logprobs=logprobs)
    found = list(call)
    chunks = {one.chunk.index: one.chunk for one in found if one.HasField("chunk")}
    wholes = {one.complete.index: one.complete for one in found if one.HasField("complete")}
    assert {index: list(one.token_ids) for index, one in chunks.items()} == {0: [5], 1: [6]}
    assert {index: list(one.output_ids) for index, one in wholes.items()} == {0: [5], 1: [6]}
    assert {index: one.cached_tokens for index, one in wholes.items()} == {0: 0, 1: 2}
    assert {index: one.cached_tokens for index, one in chunks.items()} == {0: 0, 1: 2}
    assert (chunks[0].HasField("input_logprobs"), chunks[1].HasField("input_logprobs")) == (True, False)


def test_completions_that_are_not_streamed_are_one_message_each(service: Service) -> None:
    call = generate(service, request(stream=False, n=2, logprobs=0))
    handle = service.engine.next_submit().handle
    for index, token in enumerate((5, 6)):
        service.engine.output(handle + index, [token], logprobs=[m.Logprobs(0, -0.25, (), ())])
        service.engine.output(handle + index, [7], FinishReason.LENGTH, logprobs=[m.Logprobs(0, -0.5, (), ())])
    found = [one.complete for one in call]
    assert {one.index: list(one.output_ids) for one in found} == {0: [5, 7], 1: [6, 7]}
    assert [list(one.output_logprobs.token_logprobs) for one in found] == [[-0.25, -0.5]] * 2


@pytest.mark.parametrize(
    ("reason", "stop_token_id", "named", "matched"),
    [
        (FinishReason.END_OF_SEQUENCE, 256, "stop", None),
        (FinishReason.STOP, 7, "stop", "matched_token_id"),
        (FinishReason.LENGTH, -1, "length", None),
        (FinishReason.CONTEXT_LENGTH, -1, "length", None),
        (FinishReason.ABORTED, -1, "abort", None),
    ],
)
def test_the_reason_of_an_end_has_its_name_there(
    service: Service, reason: FinishReason, stop_token_id: int, named: str, matched: str | None
) -> None:
    call = generate(service)
    token = max(stop_token_id, 1)
    service.engine.output(service.engine.next_submit().handle, [5, token], reason, stop_token_id)
    whole = list(call)[-1].complete
    assert (list(whole.output_ids), whole.finish_reason) == ([5, token], named)
    assert whole.WhichOneof("matched_stop") == matched


@pytest.mark.parametrize("keeps", [False, True])
def test_a_stop_string_ends_the_tokens_and_is_named(service: Service, keeps: bool) -> None:
    asked = request(stop=["b"], skip_special_tokens=True, include_stop_str_in_output=keeps)
    call = generate(service, asked)
    handle = service.engine.next_submit().handle
    a, b = ids("a")[0], ids("b")[0]
    service.engine.output(handle, [a, b, a])
    whole = list(call)[-1].complete
    assert (whole.finish_reason, whole.matched_stop_str) == ("stop", "b")
    assert list(whole.output_ids) == ([a, b] if keeps else [a])
    assert service.engine.next_cancel() == handle


def test_a_cancelled_call_and_an_aborted_one_end_in_the_engine(service: Service) -> None:
    call = generate(service)
    handle = service.engine.next_submit().handle
    service.engine.output(handle, [5])
    next(call)
    call.cancel()
    assert service.engine.next_cancel() == handle
    aborted = generate(service, request(request_id="r-2"))
    service.engine.next_submit()
    stub(service).Abort(pb.AbortRequest(request_ids=["r-2", "nobodys"]), timeout=TIMEOUT_S)
    assert list(aborted)[-1].complete.finish_reason == "abort"
    error = failure(lambda: stub(service).Abort(pb.AbortRequest(request_ids=["no id"]), timeout=TIMEOUT_S))
    assert fields(error) == ["request_ids[0]"]


def test_an_engine_that_fails_and_a_duplicate_are_statuses_with_their_reasons(service: Service) -> None:
    call = generate(service)
    service.engine.next_submit()
    error = failure(lambda: list(generate(service)))
    assert detail(error, error_details_pb2.ErrorInfo).reason == "DUPLICATE_ID"
    service.engine.send(m.Failed("DEVICE", "the device failed"))
    error = failure(lambda: list(call))
    assert (code(error), words(error)) == (grpc.StatusCode.UNAVAILABLE, "the device failed")


def test_the_model_the_server_and_its_load_are_described(service: Service) -> None:
    info = stub(service).GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT_S)
    assert (info.model_path, info.served_model_name, info.is_generation) == ("fake", "fake", True)
    assert (info.max_context_length, info.vocab_size, list(info.eos_token_ids)) == (64, 300, [256])
    server = stub(service).GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
    assert (server.active_requests, server.uptime_seconds, server.max_num_seqs) == (3, STATS.uptime_s, INFO.max_rows)
    assert (server.block_size, server.model_dtype, server.data_parallel_size) == (16, "torch.float32", 1)
    (load,) = stub(service).GetLoads(pb.GetLoadsRequest(include=["core"]), timeout=TIMEOUT_S).loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (2, 1, 3)
    used = STATS.blocks_total - STATS.blocks_free - STATS.blocks_cached
    assert (load.num_used_tokens, load.max_total_num_tokens) == (used * 16, STATS.blocks_total * 16)
    assert load.token_usage == pytest.approx(used / STATS.blocks_total)
    assert (load.max_running_requests, load.utilization) == (INFO.max_rows, 2 / INFO.max_rows)
    error = failure(lambda: stub(service).GetLoads(pb.GetLoadsRequest(dp_rank=1, include=["x"]), timeout=TIMEOUT_S))
    assert fields(error) == ["dp_rank"]


QUEUES = {"num_running_reqs", "num_waiting_reqs", "num_total_reqs", "num_waiting_uncached_tokens"}
MEMORY = {"num_used_tokens", "max_total_num_tokens", "token_usage"}
CORE = QUEUES | MEMORY | {"cache_hit_rate", "utilization", "max_running_requests"}


@pytest.mark.parametrize(
    ("include", "filled"),
    [
        ([], CORE),
        (["all"], CORE),
        (["core"], CORE),
        (["core", "disagg", "queues", "memory"], CORE),
        (["queues"], QUEUES),
        (["memory", "speculative"], MEMORY),
        (["disagg", "lora", "of tomorrow"], set()),
    ],
)
def test_sections_of_a_load_are_a_filter_and_none_is_refused(
    service: Service, include: list[str], filled: set[str]
) -> None:
    call = generate(service)
    handle = service.engine.next_submit().handle  # its three tokens wait for a row
    answer = stub(service).GetLoads(pb.GetLoadsRequest(include=include), timeout=TIMEOUT_S)
    assert {field.name for field, _ in answer.loads[0].ListFields()} == filled
    assert answer.loads[0].num_waiting_uncached_tokens == (3 if "num_waiting_uncached_tokens" in filled else 0)
    assert dict(service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats.refusals) == {}
    service.engine.output(handle, [5], FinishReason.LENGTH)
    list(call)


def test_the_tokenizer_comes_as_files_that_tokenize_alike(service: Service) -> None:
    parts = list(stub(service).GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=TIMEOUT_S))
    whole = b"".join(part.data for part in parts)
    assert [part.sha256 for part in parts] == [*[""] * (len(parts) - 1), sha256(whole).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
        config = json.loads(archive.read("tokenizer_config.json"))
    assert tokenizer.encode("def f(x):").ids == ids("def f(x):")
    assert config == {"chat_template": "{{ messages }}", "eos_token": "<|end|>"}
    again = stub(service).GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=TIMEOUT_S)
    assert b"".join(part.data for part in again) == whole


def test_health_is_that_of_the_service(service: Service) -> None:
    assert stub(service).HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT_S).healthy
    service.call(service.front_end._health.set_ready, False)
    while stub(service).HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT_S).healthy:
        pass


# ------------------------------------------------------------ who may call, and how much


def empty_call(service: Service, method: str, metadata: Any = None) -> Any:
    call: Any = service.channel.stream_stream(f"/{SERVICE}/{method}")
    return failure(lambda: list(call(iter([b""]), timeout=TIMEOUT_S, metadata=metadata)))


@pytest.mark.parametrize("method", ALL)
def test_every_method_asks_who_calls_and_those_that_are_not_served_are_not_there(tmp_path: Path, method: str) -> None:
    with served(tmp_path, f"alice generate token {ALICE}\n") as service:
        assert code(empty_call(service, method)) == grpc.StatusCode.UNAUTHENTICATED
        if method not in SERVED:
            assert f"/{SERVICE}/{method}" not in RIGHTS_FOR or method == "SubscribeKvEvents", "which a setting adds"
            assert code(empty_call(service, method, bearer(ALICE))) == grpc.StatusCode.UNIMPLEMENTED
        elif "generate" not in RIGHTS_FOR[f"/{SERVICE}/{method}"]:
            assert code(empty_call(service, method, bearer(ALICE))) == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("method", ALL)
def test_without_the_setting_there_is_no_such_method(tmp_path: Path, method: str) -> None:
    path = tmp_path / "engine.sock"
    with Service(FakeEngine(path), path) as service:
        assert code(empty_call(service, method)) == grpc.StatusCode.UNIMPLEMENTED


def test_a_request_is_its_callers_there_too(tmp_path: Path) -> None:
    callers = f"alice generate token {ALICE}\nbob generate token {BOB}\n"
    with served(tmp_path, callers) as service:
        call = generate(service, metadata=bearer(ALICE))
        submit = service.engine.next_submit()
        assert submit.request_id == "alice/r-1" and submit.cache_salt == "alice/"
        stub(service).Abort(pb.AbortRequest(request_ids=["r-1"]), timeout=TIMEOUT_S, metadata=bearer(BOB))
        service.engine.output(submit.handle, [5], FinishReason.LENGTH)
        assert list(call)[-1].complete.finish_reason == "length", "somebody else's id is one that is not there"


def test_its_completions_count_for_the_limit_and_have_a_line_in_the_log(tmp_path: Path) -> None:
    with log_lines() as lines, served(tmp_path, max_streams=1) as service:
        call = generate(service)
        handle = service.engine.next_submit().handle
        error = failure(lambda: list(generate(service, request(request_id="r-2"))))
        assert code(error) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert lines.call("Generate")["code"] == "RESOURCE_EXHAUSTED"
        service.engine.output(handle, [5], FinishReason.LENGTH)
        list(call)
        line = lines.call("Generate")
        assert (line["method"], line["level"], line["finish"]) == (f"/{SERVICE}/Generate", "info", "LENGTH")
        assert dict(call.initial_metadata())["x-request-id"] == line["x_request_id"]


def test_reflection_describes_it_with_the_methods_that_it_has(service: Service) -> None:
    reflect: Any = service.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=ServerReflectionRequest.SerializeToString,
        response_deserializer=ServerReflectionResponse.FromString,
    )
    questions = [
        ServerReflectionRequest(list_services=""),
        ServerReflectionRequest(file_containing_symbol=common_pb2.FlushCacheRequest.DESCRIPTOR.full_name),
        ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    listed, file, engine = list(reflect(iter(questions), timeout=TIMEOUT_S))
    assert SERVICE in [each.name for each in listed.list_services_response.service]
    assert file.file_descriptor_response.file_descriptor_proto
    files = map(FileDescriptorProto.FromString, engine.file_descriptor_response.file_descriptor_proto)
    (described,) = (each for described in files for each in described.service)
    assert {method.name for method in described.method} == set(SERVED)


def test_the_setting_without_the_extra_is_refused_by_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = FrontEndSettings(vllm_facade=True)
    check_extras(settings, flag_of)
    monkeypatch.setattr("runahead.service.settings.server_config.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--vllm-facade needs the extra vllm-facade"):
        check_extras(settings, flag_of)
    check_extras(msgspec.structs.replace(settings, vllm_facade=False), flag_of)
