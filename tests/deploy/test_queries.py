"""What alerts, the dashboard and autoscalers ask of Prometheus is what `/metrics` serves."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.local_service import local_service
from runahead.service.shared_memory.call_tables import CODES
from runahead.v1 import GenerateRequest, GenerationServiceStub, StoppingOptions
from tests.deploy.queries import (
    JOB,
    OF_PROMETHEUS,
    adapted_queries,
    adapter_rules,
    alerts,
    dashboard,
    labels_in,
    names_in,
    queries,
    values_in,
)
from tests.deploy.rendering import COMPOSITIONS, Manifests
from tests.project.repository import ROOT

MakeManifests = Callable[[str], Manifests]
OPERATIONS: Final = ROOT / "docs" / "operations.md"
LABELS_OF_A_TARGET: Final = {"namespace", "pod", "job", "le"}  # Prometheus gives them; `le` is a histogram's
SUFFIXES: Final = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
WITH_QUERIES: Final = ("monitoring", "hpa", "keda", "gpu-with-all", "tls-elsewhere")


@pytest.fixture(scope="module")
def served() -> Iterator[Mapping[str, set[str]]]:
    """Metrics of a real service that has completed something: the labels of each by its name."""
    with local_service() as service:
        with grpc.insecure_channel(service.url) as channel:
            request = GenerateRequest(text="def f():\n", stopping=StoppingOptions(max_tokens=8))
            assert list(GenerationServiceStub(channel).Generate(request, timeout=60))
        with urllib.request.urlopen(f"http://127.0.0.1:{service.ports['metrics']}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        labels = {label for sample in family.samples for label in sample.labels}
        found |= {family.name + suffix: labels for suffix in SUFFIXES[family.type]}
    yield found


def unknown_names(expression: str, served: Mapping[str, set[str]]) -> set[str]:
    return names_in(expression) - served.keys() - OF_PROMETHEUS


@pytest.mark.parametrize("name", WITH_QUERIES)
def test_every_metric_that_is_asked_for_is_served(
    name: str, manifests: MakeManifests, served: Mapping[str, set[str]]
) -> None:
    asked = list(queries(manifests(name)))
    assert asked
    assert {who: missing for who, query in asked if (missing := unknown_names(query, served))} == {}


def test_every_composition_with_queries_is_looked_at(manifests: MakeManifests) -> None:
    assert {name for name in COMPOSITIONS if list(queries(manifests(name)))} == set(WITH_QUERIES)


def test_the_dashboard_shows_what_the_alerts_are_about(manifests: MakeManifests) -> None:
    panels = {name for who, query in queries(manifests("monitoring")) if "panel" in who for name in names_in(query)}
    assert len(panels) > 25
    alerted = {name for each in alerts(manifests("monitoring")) for name in names_in(each["expr"])}
    assert alerted - panels - OF_PROMETHEUS == {"runahead_front_ends_lost_total"}


def test_every_label_that_is_asked_for_is_one(manifests: MakeManifests, served: Mapping[str, set[str]]) -> None:
    """Of metrics without a sample yet the labels are not known here: of refusals, drains and the like, a reason."""
    wrong: dict[str, set[str]] = {}
    for who, query in queries(manifests("keda")):
        known = {label for name in names_in(query) - OF_PROMETHEUS for label in served[name]}
        wrong |= {who: labels} if (labels := labels_in(query) - LABELS_OF_A_TARGET - {"reason"} - known) else {}
    assert wrong == {}


def test_codes_of_calls_are_those_that_are_counted(manifests: MakeManifests) -> None:
    matched = {code for _, query in queries(manifests("monitoring")) for code in codes_in(query)}
    assert matched == {"Internal", "Unknown", "Unavailable", "DataLoss"}
    assert matched <= set(CODES)


def codes_in(query: str) -> list[str]:
    _, found, rest = query.partition('grpc_code=~"')
    return rest.partition('"')[0].split("|") if found else []


def test_jobs_and_namespaces_are_those_of_the_manifests(manifests: MakeManifests) -> None:
    """A ServiceMonitor's job is the name of its Service."""
    composed = manifests("keda")
    composed.one("Service", JOB)
    values = {(label, value) for _, query in queries(composed) for _, label, value in values_in(query)}
    assert {value for label, value in values if label == "job"} == {JOB}
    assert {value for label, value in values if label == "namespace"} == {"runahead"}


def test_a_horizontal_autoscaler_asks_for_what_the_adapter_serves(
    manifests: MakeManifests, served: Mapping[str, set[str]]
) -> None:
    wanted = {
        each["pods"]["metric"]["name"] for each in manifests("hpa").one("HorizontalPodAutoscaler")["spec"]["metrics"]
    }
    assert wanted == {name for name, _ in adapted_queries()}
    for _, query in adapted_queries():
        assert unknown_names(query, served) == set()
    for rule in adapter_rules():
        assert unknown_names(rule["seriesQuery"], served) == set()


def test_every_alert_has_its_section(manifests: MakeManifests) -> None:
    """With what it means and what to do, where its annotation says."""
    sections = sections_of(OPERATIONS.read_text(encoding="utf-8"))
    rules = list(alerts(manifests("monitoring")))
    assert len(rules) > 10
    for alert in rules:
        name = alert["alert"]
        assert alert["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"
        assert "**Means**" in sections[name] and "**Do**" in sections[name]
    assert {name for name in sections if name.startswith("Runahead")} == {alert["alert"] for alert in rules}


def sections_of(text: str) -> dict[str, str]:
    """What stands under each heading of the third level."""
    parts = text.split("\n### ")[1:]
    return {part.partition("\n")[0]: part.partition("\n## ")[0] for part in parts}


def test_panels_have_places_of_their_own(manifests: MakeManifests) -> None:
    places: list[dict[str, Any]] = [panel["gridPos"] for panel in dashboard(manifests("monitoring"))["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)


# ---------------------------------------------------------------- the checks themselves


def test_a_metric_that_nobody_serves_is_seen(served: Mapping[str, set[str]]) -> None:
    wrong = 'sum(rate(vllm:gpu_cache_usage_perc{job="x"}[5m])) / on (pod) vllm:num_requests_running'
    assert unknown_names(wrong, served) == {"vllm:gpu_cache_usage_perc"}
    assert unknown_names("vllm:generation_tokens", served) == {"vllm:generation_tokens"}  # it is a counter


def test_a_query_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="parenthesis"):
        names_in("sum(rate(up[5m])")


def test_labels_of_a_query_are_found() -> None:
    query = 'sum by (grpc_code) (rate(grpc_server_handled_total{namespace="a", grpc_method!="b"}[5m]))'
    assert labels_in(query) == {"grpc_code", "namespace", "grpc_method"}
    assert list(values_in(query)) == [("grpc_server_handled_total", "namespace", "a")]


def test_a_section_that_is_missing_is_seen() -> None:
    text = "# a\n\n### RunaheadAbsent\n\n**Means** b. **Do** c.\n\n## d\n\n### e\n\nf\n"
    assert sections_of(text) == {"RunaheadAbsent": "RunaheadAbsent\n\n**Means** b. **Do** c.\n", "e": "e\n\nf\n"}
