"""The layer after which a launch's tail begins."""

from __future__ import annotations

import pytest

from runahead.cuda_graphs.tail import TailPlacement

OF_8B = TailPlacement(layers=32, least_ms=4.0, ms_per_token=0.025)


@pytest.mark.parametrize(
    ("tokens", "layers"),
    [
        (1, 16),  # 4 ms
        (160, 16),
        (200, 19),  # 5 ms: after 19.2 layers
        (1000, 29),  # 25 ms: after 29.4 layers
        (8192, 31),
        (0, 0),  # a closing launch
    ],
)
def test_at_least_2_ms_of_a_launch_are_its_tail(tokens: int, layers: int) -> None:
    assert OF_8B.layers_before(tokens) == layers


@pytest.mark.parametrize(("least_ms", "layers"), [(0.6, 0), (2.0, 0), (2.6, 0), (2.7, 8), (3.0, 10)])
def test_a_short_launch_is_in_its_tail_once_it_is_sampled(least_ms: float, layers: int) -> None:
    assert TailPlacement(layers=32, least_ms=least_ms, ms_per_token=0.001).layers_before(8) == layers


def test_without_measurements_every_launch_is() -> None:
    assert TailPlacement().layers_before(4096) == 0
