"""Which row counts get a captured graph."""

from __future__ import annotations

import pytest

from runahead.cuda_graphs.graph_pool import buckets_for


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8, 9, 48, 64, 65, 100, 256, 512])
def test_buckets_ascend_and_end_with_the_largest_launch(max_rows: int) -> None:
    buckets = buckets_for(max_rows)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == max_rows


def test_a_bucket_is_never_twice_as_large_as_what_it_holds() -> None:
    buckets = buckets_for(512)
    for rows in range(1, 513):
        bucket = next(bucket for bucket in buckets if bucket >= rows)
        assert bucket < 2 * rows or rows == bucket
