"""Histograms of times: fixed buckets that can be added, and quantiles that are right to a bucket."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runahead.runtime.engine.figures import Histogram
from runahead.runtime.wire.figures import BOUNDS_S, quantile

times = st.lists(st.floats(0, 5000, allow_nan=False), min_size=1, max_size=60)


def of(seconds: list[float]) -> Histogram:
    histogram = Histogram()
    histogram.add_each(np.array(seconds))
    return histogram


def test_the_bounds_are_ascending_ten_to_a_decade() -> None:
    assert (BOUNDS_S[0], BOUNDS_S[10], BOUNDS_S[-1]) == (1e-5, 1e-4, 1e3)
    assert all(1.25 < high / low < 1.27 for low, high in pairwise(BOUNDS_S))


@settings(deadline=None)
@given(times)
def test_a_time_is_in_the_bucket_between_its_bounds_however_it_is_added(seconds: list[float]) -> None:
    one_by_one = Histogram()
    for value in seconds:
        one_by_one.add(value)
    together = of(seconds)
    assert together.counts.tolist() == one_by_one.counts.tolist()
    assert together.sum_s == pytest.approx(one_by_one.sum_s)
    edges = (-1.0, *BOUNDS_S, float("inf"))
    expected = [sum(low < value <= high for value in seconds) for low, high in pairwise(edges)]
    assert together.counts.tolist() == expected


def test_a_time_that_is_added_several_times_counts_and_adds_up_as_often() -> None:
    histogram = Histogram()
    histogram.add(0.5, times=64)
    assert (histogram.counts.sum(), histogram.sum_s) == (64, 32.0)


@settings(deadline=None)
@given(times, times)
def test_the_sum_of_two_histograms_is_that_of_all_times(ours: list[float], theirs: list[float]) -> None:
    assert (of(ours).counts + of(theirs).counts).tolist() == of(ours + theirs).counts.tolist()


@settings(deadline=None)
@given(times, st.sampled_from((0.5, 0.9, 0.99, 1.0)))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(seconds: list[float], share: float) -> None:
    found = quantile(of(seconds).counts.tolist(), share)
    true = float(np.quantile(seconds, share, method="inverted_cdf"))
    edges = (0.0, *BOUNDS_S, float("inf"))
    low, high = next((low, high) for low, high in pairwise(edges) if true <= high)
    assert low <= found <= high
