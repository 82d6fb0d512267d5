"""Methods whose names are no text: the library answers them itself, and no code of ours is reached."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from runahead.runtime.wire.parameters import FinishReason
from runahead.service.log.logs import _Forward
from runahead.v1 import GenerateRequest, GetModelInfoRequest
from tests.service.fake_engine import TIMEOUT_S
from tests.service.log_lines import LogLines, log_lines
from tests.service.raw_http2 import RawClient
from tests.service.running_service import Service


@pytest.fixture
def lines() -> Iterator[LogLines]:
    """With what libraries log, as in a process that serves."""
    forward, root = _Forward(), logging.getLogger()
    root.addHandler(forward)
    with log_lines() as taken:
        yield taken
    root.removeHandler(forward)


def test_a_method_whose_name_is_no_text_costs_its_own_call_alone(service: Service) -> None:
    """In some versions of the library it ends the loop that takes calls, for everybody and for good."""
    stream = service.stub.Generate(GenerateRequest(text="x"), timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    with RawClient(service.port) as client:
        strange = client.begin("", {":path": "/\udcff\udcfe/x"})
        client.message(strange, b"", ends=True)
        client.status_of(strange)
    assert service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S).model == "fake"
    service.engine.output(handle, [1], FinishReason.LENGTH)
    assert list(stream)[-1].HasField("finished")


def test_methods_whose_names_are_no_text_have_a_bounded_number_of_lines_whatever_they_are(
    service: Service, lines: LogLines
) -> None:
    """The library itself answers, with UNKNOWN, and logs each name: ours never sees it. docs/contract.md says so."""
    with RawClient(service.port) as client:
        for number in range(50):
            strange = client.begin("", {":path": f"/\udcff{number}"})
            client.message(strange, b"", ends=True)
            status = client.status_of(strange).payload
            assert number or b"grpc-status\x012" in status, "later ones are shortened"
    logged = [line for line in lines.rest() if line["event"] == "library"]
    assert len(logged) == 20 and {line["error"] for line in logged} == {"UnicodeDecodeError"}
