"""What a request waits for, as docs/troubleshooting.md finds it in `/metrics`."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from typing import Final

import grpc
import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.local_service import LocalService, local_service
from runahead.v1 import GenerateRequest, GenerationServiceStub, SamplingOptions, StoppingOptions
from tests.project.repository import ROOT

TIMEOUT_S: Final = 60.0
ROWS: Final = 4
PAGE: Final = ROOT / "docs" / "troubleshooting.md"
WITH_PENALTY: Final = GenerateRequest(
    text="def f():\n",
    sampling=SamplingOptions(presence_penalty=0.5),
    stopping=StoppingOptions(max_tokens=2000, ignore_eos=True),
)


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    """With rows for four requests, one of them with penalties."""
    with local_service(["--max-rows", str(ROWS), "--penalty-slots", "1"]) as running:
        yield running


def families(service: LocalService) -> list[Metric]:
    with urllib.request.urlopen(f"http://127.0.0.1:{service.ports['metrics']}/metrics", timeout=TIMEOUT_S) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def figures(service: LocalService) -> dict[str, float]:
    """By name and state."""
    return {
        " ".join((sample.name, *filter(None, [sample.labels.get("state")]))): sample.value
        for family in families(service)
        for sample in family.samples
    }


def test_a_request_that_waits_for_a_penalty_slot_beside_free_rows_shows_in_the_figures(service: LocalService) -> None:
    with grpc.insecure_channel(service.url) as channel:
        stub = GenerationServiceStub(channel)
        first, second = (stub.Generate(WITH_PENALTY, timeout=TIMEOUT_S) for _ in range(2))
        assert next(first).HasField("accepted") and next(second).HasField("accepted")
        while not (found := figures(service))["vllm:num_requests_running"]:
            pass  # until one of them has a row
        assert found["vllm:num_requests_waiting"] == 1
        assert found["runahead_penalty_slots free"] == 0 and found["runahead_penalty_slots owned"] == 1
        assert found["runahead_row_slots free"] == ROWS - 1 and found["runahead_row_slots owned"] == 1
        first.cancel()
        second.cancel()


def test_every_figure_that_the_page_names_is_served(service: LocalService) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("\n## A request waited\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?:runahead_|vllm:)[^`]+)`", section))
    assert {'runahead_row_slots{state="free"}', 'runahead_penalty_slots{state="free"}'} <= named
    served = set[str]()
    for family in families(service):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        states = {sample.labels["state"] for sample in family.samples if "state" in sample.labels}
        served |= {name, *(f'{name}{{state="{state}"}}' for state in states)}
    assert named - served == set()


def test_what_a_figure_of_waiting_counts_is_said_in_full(service: LocalService) -> None:
    said = {family.name: family.documentation for family in families(service)}
    assert "a penalty slot" in said["vllm:num_requests_waiting"]
    assert "chat" in said["runahead_preparing_requests"] and "structure" in said["runahead_preparing_requests"]
    assert "chats" in said["runahead_tokenizer_queue"]
