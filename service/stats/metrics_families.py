"""Figures as families of metrics, in the few shapes that there are of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from runahead.runtime.wire.figures import HistogramStats
from runahead.runtime.wire.histogram import BOUNDS_S

_STEP = 2  # every other bound of the engine's: they stay 58 % apart, and a scrape half as long


def gauge(name: str, what: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    """One number that goes up and down."""
    labels = labels or {}
    family = GaugeMetricFamily(name, what, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def gauges(name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
    """One for each value of a label."""
    family = GaugeMetricFamily(name, what, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def counter(name: str, what: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    """One number that grows. name: without `_total`, which is put behind it."""
    labels = labels or {}
    family = CounterMetricFamily(name, what, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def counters(
    name: str, what: str, label: str, values: Mapping[str, float], labels: Mapping[str, str] | None = None
) -> Metric:
    """One for each value of a label. labels: that all have beside it."""
    labels = labels or {}
    family = CounterMetricFamily(name, what, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family


def from_zero(known: Sequence[str], values: Mapping[str, float]) -> Mapping[str, float]:
    """With 0 for each known value of the label that has no number yet: PromQL's `rate` leaves out a series' first
    sample."""
    return {**dict.fromkeys(known, 0), **values}


def engine_histogram(name: str, what: str, times: HistogramStats, labels: Mapping[str, str]) -> Metric:
    """Times as the engine counts them."""
    family = HistogramMetricFamily(name, what, labels=list(labels))
    family.add_metric(list(labels.values()), _cumulative(BOUNDS_S, times.counts, _STEP), times.sum_s)
    return family


def add_histogram(
    family: HistogramMetricFamily, labels: Sequence[str], bounds: Sequence[float], counts: Sequence[int], sum_s: float
) -> None:
    """counts: by bucket, the last above every bound."""
    family.add_metric(labels, _cumulative(bounds, counts, 1), sum_s)


def _cumulative(bounds: Sequence[float], counts: Sequence[int], step: int) -> list[tuple[str, float]]:
    """As Prometheus has buckets: each with all that is below its bound, the last one with everything."""
    buckets: list[tuple[str, float]] = []
    below = 0
    for place, (bound, count) in enumerate(zip(bounds, counts, strict=False)):
        below += count
        if place % step == 0:
            buckets.append((str(bound), below))
    return [*buckets, ("+Inf", sum(counts))]
