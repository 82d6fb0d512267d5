"""Constructors of metric families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from runahead.runtime.wire.figures import HistogramStats
from runahead.runtime.wire.histogram import BOUNDS_S

_STEP = 2  # every second bound of the engine's: 58 % apart, half the size of a scrape


def gauge(name: str, what: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    """Make a gauge."""
    labels = labels or {}
    family = GaugeMetricFamily(name, what, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def gauges(name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
    """Make a gauge for each value of a label."""
    family = GaugeMetricFamily(name, what, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def counter(name: str, what: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    """Make a counter. name: without the suffix `_total`."""
    labels = labels or {}
    family = CounterMetricFamily(name, what, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def counters(
    name: str, what: str, label: str, values: Mapping[str, float], labels: Mapping[str, str] | None = None
) -> Metric:
    """Make a counter for each value of a label. labels: common ones."""
    labels = labels or {}
    family = CounterMetricFamily(name, what, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family


def from_zero(known: Sequence[str], values: Mapping[str, float]) -> Mapping[str, float]:
    """Add 0 for each known label value without a count: PromQL's `rate` ignores a series' first sample."""
    return {**dict.fromkeys(known, 0), **values}


def engine_histogram(name: str, what: str, times: HistogramStats, labels: Mapping[str, str]) -> Metric:
    """Make a histogram of the engine's times."""
    family = HistogramMetricFamily(name, what, labels=list(labels))
    family.add_metric(list(labels.values()), _cumulative(BOUNDS_S, times.counts, _STEP), times.sum_s)
    return family


def add_histogram(
    family: HistogramMetricFamily, labels: Sequence[str], bounds: Sequence[float], counts: Sequence[int], sum_s: float
) -> None:
    """Add a series. counts: by bucket, the last above every bound."""
    family.add_metric(labels, _cumulative(bounds, counts, 1), sum_s)


def _cumulative(bounds: Sequence[float], counts: Sequence[int], step: int) -> list[tuple[str, float]]:
    """Make Prometheus's cumulative buckets."""
    buckets: list[tuple[str, float]] = []
    below = 0
    for index, (bound, count) in enumerate(zip(bounds, counts, strict=False)):
        below += count
        if index % step == 0:
            buckets.append((str(bound), below))
    return [*buckets, ("+Inf", sum(counts))]
