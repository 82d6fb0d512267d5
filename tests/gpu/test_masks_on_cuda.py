"""Rows with a grammar on a GPU, captured graphs and all: their masks come late, their tokens are those of masks in
time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from runahead.cuda_graphs.shape import Form
from tests.gpu import gpu_chain
from tests.runtime.kernels.masked_engine import LaggingMasks, masked_config, served

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROWS, NUM_BLOCKS, REQUESTS = 4, 65, 16


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def engine(run_ahead: int, lag: int) -> gpu_chain.EngineUnderTest:
    """By the exact kernels: which rows are beside a row is then all the same."""
    config, masks = masked_config(), LaggingMasks(ROWS, lag)
    under_test = gpu_chain.cuda_engine(
        config,
        gpu_chain.random_weights(config, torch.bfloat16),
        run_ahead,
        max_rows=ROWS,
        num_blocks=NUM_BLOCKS,
        exact=True,
        masks=masks,
        mask_memory=masks.memory,
    )
    masks.committed = lambda: under_test.engine.ledger.committed
    return under_test


def test_tokens_are_those_of_masks_in_time_however_late_they_come() -> None:
    """Tokens, reasons and log-probabilities, at every depth."""
    expected = served(engine(0, 0), REQUESTS)
    for run_ahead in (0, 1, 2, 4):
        under_test = engine(run_ahead, 2)
        found = served(under_test, REQUESTS)
        differing = [handle for handle in expected[0] if found[0].get(handle) != expected[0][handle]]
        assert not differing, f"depth {run_ahead}: {len(differing)} of {REQUESTS} requests differ: {differing}"
        assert found == expected, f"depth {run_ahead}: reasons or log-probabilities differ"
        stats = under_test.engine.stats()
        print(f"depth {run_ahead}: held {stats.held_rows}, {stats.fallbacks}")
        assert stats.held_rows > 0, "no mask came late"


def test_a_launch_without_such_rows_is_the_graph_that_it_was() -> None:
    config = masked_config()
    with_masks = engine(1, 0)
    without = gpu_chain.cuda_engine(
        config, gpu_chain.random_weights(config, torch.bfloat16), 1, max_rows=ROWS, num_blocks=NUM_BLOCKS, exact=True
    )
    for under_test in (with_masks, without):
        under_test.engine.turn()
    mine, theirs = with_masks.device, without.device
    for form in Form:
        key = mine.launch_key(ROWS, form)  # type: ignore[attr-defined]
        assert key == theirs.launch_key(ROWS, form)  # type: ignore[attr-defined]
        assert mine.graphs.nodes(key) == theirs.graphs.nodes(key)  # type: ignore[attr-defined]
    masked = mine.launch_key(ROWS, Form.FULL, masked=True)  # type: ignore[attr-defined]
    full = mine.launch_key(ROWS, Form.FULL)  # type: ignore[attr-defined]
    assert mine.graphs.nodes(masked) == mine.graphs.nodes(full) + 1  # type: ignore[attr-defined]
    for device in (mine, theirs):
        device.close()
