"""Rows with a grammar on a GPU, captured graphs and all: their masks come late, their tokens are those of masks in
time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runahead.cuda_graphs.device import Form
from tests.gpu import gpu_chain
from tests.gpu.test_drafts_on_cuda import FORMS, Sometimes
from tests.runtime.kernels.masked_engine import (
    lagging_masks,
    long_requests,
    masked_config,
    random_head,
    requests,
    served,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("without_gradients")]

ROWS, NUM_BLOCKS, REQUESTS = 4, 65, 16


def engine(
    run_ahead: int, lag: int, *, guesses: bool = False, forced: int = 0, has_head: bool = False
) -> gpu_chain.EngineUnderTest:
    """Which rows are beside a row is then all the same. guesses: by `ngram`, or where it has a
    head by that one. forced: drafts of a row whose grammar forces them."""
    drafts = Sometimes() if guesses else None
    config, masks = masked_config(), lagging_masks(ROWS, lag, drafts, forced, has_head)
    under_test = gpu_chain.cuda_engine(
        config,
        gpu_chain.random_weights(config, torch.bfloat16),
        run_ahead,
        max_rows=ROWS,
        num_blocks=NUM_BLOCKS,
        drafts=drafts,
        draft_rows=ROWS if masks.memory.drafts else 0,
        draft_forms=FORMS if masks.memory.drafts else (),
        masks=masks,
        mask_memory=masks.memory,
        make_head=random_head if has_head else None,
    )
    masks.committed = lambda: under_test.engine.ledger.committed
    return under_test


def test_tokens_are_those_of_masks_in_time_however_late_they_come() -> None:
    """Tokens, reasons and log-probabilities, at every depth."""
    expected = served(engine(0, 0), requests(REQUESTS))
    for run_ahead in (0, 1, 2, 4):
        under_test = engine(run_ahead, 2)
        found = served(under_test, requests(REQUESTS))
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
        config, gpu_chain.random_weights(config, torch.bfloat16), 1, max_rows=ROWS, num_blocks=NUM_BLOCKS
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


@pytest.mark.parametrize(("guesses", "has_head"), [(False, False), (True, False), (True, True)])
def test_drafts_of_rows_with_a_grammar_change_no_bit_however_late_masks_come(guesses: bool, has_head: bool) -> None:
    """Tokens, reasons and log-probabilities, at every depth, of what grammars force, with a drafter and without one."""
    expected = served(engine(0, 0), long_requests())
    for run_ahead in (0, 1, 2, 4):
        under_test = engine(run_ahead, 2, guesses=guesses, forced=FORMS[0], has_head=has_head)
        found = served(under_test, long_requests())
        differing = [handle for handle in expected[0] if found[0].get(handle) != expected[0][handle]]
        assert not differing, f"depth {run_ahead}: {len(differing)} requests differ: {differing}"
        assert found == expected, f"depth {run_ahead}: reasons or log-probabilities differ"
        stats = under_test.engine.stats()
        print(f"depth {run_ahead}: held {stats.held_rows}, drafted {stats.drafted}, accepted {stats.accepted}")
        assert stats.held_rows > 0, "no mask came late"
        assert stats.accepted[1] > 0, "nothing that was forced was kept"


def test_a_head_takes_no_step_in_the_graphs_of_launches_of_which_grammars_alone_say_drafts() -> None:
    under_test = engine(1, 0, guesses=True, forced=FORMS[0], has_head=True)
    device = under_test.device
    for key in device.graph_buckets.every_key():  # type: ignore[attr-defined]
        if key.forced:
            steps = device.graphs.nodes(replace(key, forced=False)) - device.graphs.nodes(key)  # type: ignore[attr-defined]
            assert steps >= 5 * FORMS[0], "a step is a layer of five kernels, and more"
    device.close()


def test_a_launch_with_drafts_and_without_such_rows_is_the_graph_that_it_was() -> None:
    """Its F may have rows that are held, and its drafter looks for what is forced: in the kernels that are there."""
    config, with_masks = masked_config(), engine(1, 0, guesses=True, forced=FORMS[0])
    without = gpu_chain.cuda_engine(
        config, gpu_chain.random_weights(config, torch.bfloat16), 1, max_rows=ROWS, num_blocks=NUM_BLOCKS,
        drafts=Sometimes(), draft_rows=ROWS, draft_forms=FORMS,
    )  # fmt: skip
    for under_test in (with_masks, without):
        under_test.engine.turn()
    mine, theirs = with_masks.device, without.device
    for form in Form:
        key = mine.launch_key(ROWS, form, FORMS[0])  # type: ignore[attr-defined]
        assert mine.graphs.nodes(key) == theirs.graphs.nodes(key)  # type: ignore[attr-defined]
    masked = mine.launch_key(ROWS, Form.FULL, FORMS[0], masked=True)  # type: ignore[attr-defined]
    full = mine.launch_key(ROWS, Form.FULL, FORMS[0])  # type: ignore[attr-defined]
    assert mine.graphs.nodes(masked) == mine.graphs.nodes(full) + 1  # type: ignore[attr-defined]
    for device in (mine, theirs):
        device.close()
