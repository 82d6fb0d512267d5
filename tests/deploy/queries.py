"""PromQL in the manifests: alerts, the dashboard, and what autoscalers ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import promql_parser
import yaml

from tests.deploy.rendering import K8S, Manifests

ADAPTER: Final = K8S / "components" / "hpa" / "prometheus-adapter.yaml"
JOB: Final = "runahead-metrics"  # that Prometheus gives to what it scrapes: the Service's name
# What a scrape adds by itself, and not the server.
OF_PROMETHEUS: Final = {"up"}


def alerts(manifests: Manifests) -> Iterator[dict[str, Any]]:
    """All rules that raise one."""
    for each in manifests.of("PrometheusRule"):
        for group in each["spec"]["groups"]:
            yield from group["rules"]


def adapter_rules(path: Path = ADAPTER) -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["rules"]["custom"]
    return rules


def dashboard(manifests: Manifests) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(manifests.one("ConfigMap", "runahead-dashboard")["data"]["runahead.json"])
    return found


def queries(manifests: Manifests) -> Iterator[tuple[str, str]]:
    """Each expression, and who asks it. Grafana's variables have values."""
    for alert in alerts(manifests):
        yield f"alert {alert['alert']}", alert["expr"]
    for each in manifests.of("ScaledObject"):
        for trigger in each["spec"]["triggers"]:
            yield f"trigger {trigger['name']}", trigger["metadata"]["query"]
    if any(each["metadata"]["name"] == "runahead-dashboard" for each in manifests.of("ConfigMap")):
        board = dashboard(manifests)
        for panel in board["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$__rate_interval", "1m").replace("$namespace", "runahead")
                yield f"panel {panel['title']}: {target['legendFormat']}", expression
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                (metric,) = re.findall(r"label_values\(([\w:]+), \w+\)", variable["query"]["query"])
                yield f"variable {variable['name']}", metric


def adapted_queries() -> Iterator[tuple[str, str]]:
    """What prometheus-adapter asks for each metric that it serves, by that metric's name."""
    for rule in adapter_rules():
        series = re.match(r"[\w:]+", rule["seriesQuery"])
        assert series is not None
        asked = rule["metricsQuery"].replace("<<.Series>>", series[0]).replace("<<.GroupBy>>", "pod")
        yield rule["name"]["as"], asked.replace("<<.LabelMatchers>>", 'namespace="runahead"')


def names_in(expression: str) -> set[str]:
    """Names of the metrics that an expression reads. Raises ValueError where it is none."""
    return {selector.name or "" for selector in _selectors(expression)}


def values_in(expression: str) -> Iterator[tuple[str, str, str]]:
    """Metric, label and value of each matcher for one value."""
    for selector in _selectors(expression):
        for matcher in selector.matchers.matchers:
            if matcher.op == promql_parser.MatchOp.Equal:
                yield selector.name or "", matcher.name, matcher.value


def labels_in(expression: str) -> set[str]:
    """Labels that are asked for, or summed by."""
    found = {matcher.name for selector in _selectors(expression) for matcher in selector.matchers.matchers}
    for node in _nodes(expression):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found.update(node.modifier.labels)
    return found


def _selectors(expression: str) -> list[promql_parser.VectorSelector]:
    return [node for node in _nodes(expression) if isinstance(node, promql_parser.VectorSelector)]


def _nodes(expression: str) -> list[promql_parser.Expr]:
    found: list[promql_parser.Expr] = []

    def visit(node: promql_parser.Expr) -> None:
        found.append(node)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found
