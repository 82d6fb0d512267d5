"""A real router with its OpenAI endpoint, in front of two replicas that ask who calls: `make router` runs this."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.local_service import logged
from tests.router.processes import HOSTS, Router, healthy, replica, router, wait_for_workers
from tests.service.hostile.proxy import HAPROXY

pytestmark = pytest.mark.timeout(400)
OBJECT: Final = {"a": int, "b": bool}
ENGINE: Final = "/vllm.grpc.engine.VllmEngine/"
METHODS: Final = ("GetLoads", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetTokenizer")


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    environment = request.config.getoption("--router")
    if not environment:
        pytest.skip("the router has an environment of its own: make router runs it")
    assert HAPROXY is not None
    with router(Path(environment).resolve(), tmp_path_factory.mktemp("router")) as made:
        yield made


@pytest.fixture(scope="module")
def found(running: Router) -> dict[str, Any]:
    """The answers to all calls of `openai_calls`."""
    return running.openai()


def choice(found: dict[str, Any], name: str) -> dict[str, Any]:
    made: dict[str, Any] = found[name]["answer"]["choices"][0]
    return made


def is_object(text: str) -> bool:
    made = json.loads(text)
    return {key: type(value) for key, value in made.items()} == OBJECT


def test_completions_and_chats_are_answered_whole_and_streamed(found: dict[str, Any]) -> None:
    assert found["models"]["answer"] == ["bundled"]
    whole, streamed = found["completion"]["answer"], found["completion streamed"]["answer"]
    assert "".join(streamed["texts"]) == whole["choices"][0]["text"]
    assert streamed["finish"] == whole["choices"][0]["finish_reason"]
    assert len(streamed["texts"]) > 2
    whole, streamed = found["chat"]["answer"], found["chat streamed"]["answer"]
    assert "".join(streamed["texts"]) == whole["choices"][0]["message"]["content"]
    for answer in (found["completion"]["answer"], whole, found["completion streamed"]["answer"], streamed):
        usage = answer["usage"]
        assert (usage["prompt_tokens"], 0 < usage["completion_tokens"] <= 12) == (5, True)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_several_completions_are_those_of_calls_alone(found: dict[str, Any]) -> None:
    several, *alone = found["several completions"]["answer"]
    choices = sorted(several["choices"], key=lambda each: each["index"])
    assert [each["index"] for each in choices] == [0, 1] and [each["text"] for each in choices] == alone
    assert several["usage"]["prompt_tokens"] == 5
    whole, streamed = found["several chats"]["answer"]
    assert {str(each["index"]): each["message"]["content"] for each in whole["choices"]} == streamed


def test_parameters_reach_the_replica(found: dict[str, Any]) -> None:
    for name in ("seed", "greedy"):
        first, second = found[name]["answer"]
        assert first == second
    stopped = choice(found, "stop")
    assert stopped["finish_reason"] == "stop" and stopped["matched_stop"] in "(:."
    assert not re.search(r"[(:.]", stopped["text"])
    scored = choice(found, "logprobs of a chat")["logprobs"]["content"]
    assert len(scored) == found["logprobs of a chat"]["answer"]["usage"]["completion_tokens"]
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in scored)
    assert len(found["prompt list"]["answer"]["choices"]) == 2
    assert choice(found, "echo")["text"].startswith("def f(x):\n")
    cached = [
        usage["prompt_tokens_details"]["cached_tokens"] for usage in found["usage of a prefix that is cached"]["answer"]
    ]
    assert cached[0] == 0 and cached[2] > 0, "the third call goes to the replica of the first one"


def test_structures_hold(found: dict[str, Any]) -> None:
    assert is_object(choice(found, "json_schema")["message"]["content"])
    assert choice(found, "regex")["message"]["content"] == "aaab"
    assert re.fullmatch("(no)*yes", choice(found, "ebnf")["message"]["content"])
    text, finish = choice(found, "json_object")["message"]["content"], choice(found, "json_object")["finish_reason"]
    assert text.startswith("{") and (finish == "length" or isinstance(json.loads(text), dict))
    for name in ("named tool", "required tool"):
        made = choice(found, name)
        assert made["finish_reason"] == "tool_calls"
        assert all(is_object(call["function"]["arguments"]) for call in made["message"]["tool_calls"])


def test_refusals_have_their_status_and_name_what_is_wrong(found: dict[str, Any]) -> None:
    for name, status, words in (
        ("no tokens", 400, "sampling_params.max_tokens must be 1 to"),
        ("too long", 400, "maximum context length is 2048"),
        ("more than a caller may have", 429, "the caller's limit is 6 (max_caller_streams)"),
        ("temperature below 0", 400, "temperature"),
        ("top_p above 1", 400, "top_p"),
        ("broken regex", 400, "sampling_params.regex can't be compiled"),
        ("broken ebnf", 400, "sampling_params.grammar can't be read as EBNF"),
        ("schema that is not enforced", 400, "sampling_params.json_schema#/not is a keyword that is not enforced"),
        ("unknown model", 404, "other"),
        ("embeddings", 501, "no such method"),
    ):
        assert found[name]["status"] == status and words in found[name]["message"], (name, found[name])


def test_what_the_router_itself_drops_is_what_the_document_lists(found: dict[str, Any]) -> None:
    """Where this fails with another version of the router, docs/routers.md changes with it."""
    assert choice(found, "logprobs of a completion")["logprobs"] is None
    assert choice(found, "echo with logprobs")["logprobs"] is None
    assert found["prompt of ids"]["status"] == 400 and "StringOrArray" in found["prompt of ids"]["message"]
    assert choice(found, "suffix")["text"].endswith("SUFFIX")
    assert len(found["best_of"]["answer"]["choices"]) == 1
    assert found["best_of"]["answer"]["usage"]["completion_tokens"] <= 4, "one completion is made, not two"
    assert found["logit_bias"]["answer"] == found["greedy"]["answer"][0][: len(found["logit_bias"]["answer"])]


def test_the_router_sees_the_loads_and_no_call_of_its_own_is_refused(running: Router, found: dict[str, Any]) -> None:
    loads = running.get("/get_loads")["loads"]
    assert [load["max_running_requests"] for load in loads] == [8, 8]
    assert all(load["max_total_num_tokens"] > 0 for load in loads)
    for each in running.replicas:
        calls = [(line["method"].removeprefix(ENGINE), line["code"]) for line in logged(each.log, "call")]
        assert [call for call in calls if call[0] in METHODS and call[1] != "OK"] == []


def test_a_client_that_goes_away_ends_its_completion(running: Router, found: dict[str, Any]) -> None:
    assert found["disconnect"]["answer"] == 5
    until = time.monotonic() + 60
    while True:
        lines = [line for each in running.replicas for line in logged(each.log, "call")]
        if any(line["code"] == "CANCELLED" or line.get("finish") == "ABORTED" for line in lines):
            return
        assert time.monotonic() < until
        time.sleep(0.2)


def test_a_client_without_the_key_is_refused_by_the_router(running: Router) -> None:
    asked = urllib.request.Request(running.url + "/v1/completions", b"{}", {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(asked, timeout=30)


def test_a_replica_that_is_added_gets_a_listener_and_calls(running: Router, tmp_path: Path) -> None:
    wait_for_workers(running, 2)
    with replica(tmp_path, "127.0.0.3", running.replicas[0].ports["service"]) as added:
        running.hop.names.addresses.append("127.0.0.3")
        wait_for_workers(running, 3)
        until = time.monotonic() + 60
        while not [line for line in logged(added.log, "call") if line["method"].endswith("/Generate")]:
            assert time.monotonic() < until
            running.openai("completion")
    running.hop.names.addresses.remove("127.0.0.3")


def test_a_replica_that_is_killed_costs_its_own_calls_and_the_next_one_gets_its_listener(
    running: Router, found: dict[str, Any], tmp_path: Path
) -> None:
    killed = running.replicas[1]
    killed.process.kill()
    killed.process.wait()
    wait_for_workers(running, 1)
    for _ in range(4):
        assert "answer" in running.openai("completion")["completion"]
    with replica(tmp_path, HOSTS[1], running.replicas[0].ports["service"]) as again:
        wait_for_workers(running, 2)
        until = time.monotonic() + 60
        while not [line for line in logged(again.log, "call") if line["method"].endswith("/Generate")]:
            assert time.monotonic() < until and len(healthy(running)) == 2
            running.openai("completion")


def test_without_a_replica_calls_are_refused_as_unavailable(running: Router) -> None:
    for each in running.replicas:
        each.process.kill()
        each.process.wait()
    until = time.monotonic() + 60
    while (last := running.openai("completion")["completion"]).get("status") != 503:
        assert time.monotonic() < until, last
        time.sleep(0.2)
