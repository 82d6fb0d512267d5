"""The line of a completion says what it waited for longest before its first launch."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, WaitReason
from runahead.v1 import Chat, ChatMessage, GenerateRequest, Structure, TokenIds
from tests.project.repository import ROOT
from tests.service.fake_engine import INFO, TIMEOUT_S, FakeEngine
from tests.service.log_lines import Line, LogLines, log_lines
from tests.service.running_service import Service

SLOW_S = 0.05
IDS = GenerateRequest(token_ids=TokenIds(ids=[1]))
CHAT = Chat(messages=[ChatMessage(role="user", content="Hello")])
BY_FRONT_END = {"tokenizer", "chat", "structure", "admission"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    path = tmp_path_factory.mktemp("engine") / "engine.sock"
    info = msgspec.structs.replace(INFO, structures=True)
    with Service(FakeEngine(path, m.Welcome(m.PROTOCOL_VERSION, "server-1", info)), path) as running:
        yield running


@pytest.fixture
def lines() -> Iterator[LogLines]:
    with log_lines() as taken:
        yield taken


@pytest.fixture
def slow(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each preparation takes `SLOW_S`."""

    def later(answer: object) -> Any:
        async def work(*_: object) -> object:
            await asyncio.sleep(SLOW_S)
            return answer

        return work

    async def no_ends() -> tuple[int, ...]:
        return ()

    servicer: Any = service.front_end.servicer
    monkeypatch.setattr(servicer._structures, "grammar", later("{}"))
    monkeypatch.setattr(servicer._texts, "prompt", later(np.array([1], np.int32)))
    monkeypatch.setattr(servicer._texts, "chat_prompt", later(np.array([1], np.int32)))
    monkeypatch.setattr(servicer._chats, "end_token_ids", no_ends)


def served(service: Service, lines: LogLines, request: GenerateRequest, reason: WaitReason, waited_s: float) -> Line:
    """The line of a completion that waited so long in the engine."""
    call = service.stub.Generate(request, timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    service.engine.send(m.Admitted(handle, 0, waited_s, reason, waited_s))
    service.engine.output(handle, [5], FinishReason.LENGTH)
    list(call)
    return lines.call("Generate")


@pytest.mark.parametrize("reason", WaitReason)
def test_what_the_engine_says_is_in_the_line(service: Service, lines: LogLines, reason: WaitReason) -> None:
    line = served(service, lines, IDS, reason, 2.5)
    assert (line["waited_for"], line["waited_s"]) == (reason.name.lower(), 2.5)


@pytest.mark.parametrize(
    ("request_of", "waited_for"),
    [
        ({"text": "once"}, "tokenizer"),
        ({"chat": CHAT}, "chat"),
        ({"token_ids": TokenIds(ids=[1]), "structure": Structure(regex="a")}, "structure"),
    ],
)
@pytest.mark.usefixtures("slow")
def test_a_preparation_counts_where_it_takes_longer_than_the_engine(
    service: Service, lines: LogLines, request_of: dict[str, Any], waited_for: str
) -> None:
    line = served(service, lines, GenerateRequest(**request_of), WaitReason.LAUNCH, SLOW_S / 2)
    assert line["waited_for"] == waited_for and line["waited_s"] >= SLOW_S / 2
    line = served(service, lines, GenerateRequest(**request_of), WaitReason.KV_BLOCKS, 60.0)
    assert (line["waited_for"], line["waited_s"]) == ("kv_blocks", 60.0)


@pytest.mark.usefixtures("slow")
def test_a_call_that_leaves_before_it_is_admitted_says_what_it_waited_for(service: Service, lines: LogLines) -> None:
    call = service.stub.Generate(GenerateRequest(text="once"), timeout=SLOW_S / 4)
    assert call.code().name == "DEADLINE_EXCEEDED"
    assert lines.call("Generate")["waited_for"] == "tokenizer"
    call = service.stub.Generate(IDS, timeout=TIMEOUT_S)
    assert next(call).HasField("accepted")
    call.cancel()
    assert lines.call("Generate")["waited_for"] == "admission"


def test_other_calls_wait_for_nothing(service: Service, lines: LogLines) -> None:
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        list(service.stub.Generate(GenerateRequest(), timeout=TIMEOUT_S))
    line = lines.call("Generate")
    assert "waited_for" not in line and "waited_s" not in line


def test_the_page_explains_each_value() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.partition("\n## A request waited\n")[2].partition("\n## ")[0]
    cells = "".join(re.findall(r"^\|([^|]+)\|", section, re.MULTILINE)[2:])
    explained = re.findall(r"`(\w+)`", cells)
    assert sorted(explained) == sorted({reason.name.lower() for reason in WaitReason} | BY_FRONT_END)
