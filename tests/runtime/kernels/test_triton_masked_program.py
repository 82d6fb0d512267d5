"""Whole launches in Triton with rows that have grammars, whose masks come late: the tokens are those of the reference
with every mask in time."""

from __future__ import annotations

import pytest

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = pytest.mark.timeout(600)  # a whole engine in Triton's interpreter takes its time

from runahead.runtime.wire.parameters import FinishReason  # noqa: E402
from tests.runtime.kernels.masked_engine import masked_engine, reference_engine, served  # noqa: E402

MAX_ROWS = 4
REQUESTS = 7


@pytest.mark.parametrize("run_ahead", [2, *(pytest.param(depth, marks=pytest.mark.large) for depth in (0, 1, 4))])
def test_the_tokens_are_those_of_the_reference_however_late_masks_come(run_ahead: int) -> None:
    expected = served(reference_engine(2, MAX_ROWS), REQUESTS)
    under_test = masked_engine(DEVICE, run_ahead, MAX_ROWS, lag=2)
    found = served(under_test, REQUESTS)
    assert found[:2] == expected[:2]
    assert under_test.engine.stats().held_rows > 5, "no mask came late"
    assert FinishReason.NOTHING_LEFT in found[1].values()
    assert FinishReason.END_OF_SEQUENCE in found[1].values()
