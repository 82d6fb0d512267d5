"""Several completions of one prompt, of models with recurrent states, on the CPU's device with delays and poison: each
is that of a request alone, and the prompt is computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.runtime.engine.test_recurrent_rows import Life

N, BLOCK, TOKENS = 5, 8, 30
# Of one block and less, up to a border with a snapshot, behind it, and within a chunk.
PROMPTS = [[(31 * i + 7 * j + i * j) % 150 for j in range(length)] for i, length in enumerate((7, 17, 33, 43, 51))]


def ask(life: Life, handle: int, prompt: list[int], seed: int, n: int = 1, prompt_logprobs: int = -1) -> None:
    sampling = SamplingParams(seed=seed, prompt_logprobs=prompt_logprobs)
    stopping = StoppingParams(TOKENS, ignore_eos=True)
    ids = np.asarray(prompt, np.int32).tobytes()
    life.links.tell(1, m.Submit(handle, f"r{handle}", ids, sampling, stopping, n=n))


def life_of(folder: Path, depth: int, **sizes: Any) -> Life:
    return Life(folder, depth, **{"max_rows": N, "num_blocks": 120, **sizes})


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, list[int]]:
    """By 10 * prompt + index, what a request gets of an engine that is serial and has one row."""
    life = life_of(folder, 0, max_rows=1, prefix_cache=False)
    for i, prompt in enumerate(PROMPTS):
        for k in range(N):
            ask(life, 10 * i + k + 1, prompt, 5 + k)
            life.run()
    found = life.said()
    life.device.close()
    return found


@pytest.mark.parametrize(
    ("depth", "sizes"),
    [(0, {"prefix_cache": False}), (4, {"prefix_cache": False}), (2, {}), (3, {"state_snapshot_blocks": 4})],
)
def test_each_completion_is_that_of_a_request_alone_and_the_prompt_is_computed_once(
    folder: Path, alone: dict[int, list[int]], depth: int, sizes: dict[str, Any]
) -> None:
    life = life_of(folder, depth, **sizes)
    for i, prompt in enumerate(PROMPTS):
        before = life.engine.stats()
        ask(life, 10 * i + 1, prompt, 5, n=N, prompt_logprobs=1 if i == 3 else -1)
        life.run()
        stats = life.engine.stats()
        computed = stats.prompt_tokens - before.prompt_tokens - stats.cached_tokens + before.cached_tokens
        assert computed <= len(prompt) + N * BLOCK
    found = life.said()
    life.device.close()
    assert found == alone
    snapshots = life.engine.scheduler.holdings.snapshots
    assert snapshots.available == snapshots.total, "a snapshot was not given back"
    if "prefix_cache" in sizes:
        assert (snapshots.free, life.engine.scheduler.pool.cached) == (snapshots.total, 0), "something is still found"


def test_all_at_once_in_few_rows_and_blocks(folder: Path, alone: dict[int, list[int]]) -> None:
    life = life_of(folder, 3, max_rows=3, num_blocks=17, prefix_cache=False)
    for i, prompt in enumerate(PROMPTS):
        ask(life, 10 * i + 1, prompt, 5, n=N)
    found = life.run()
    life.device.close()
    assert life.engine.stats().events["evicted"].count > 0
    assert found == alone
    snapshots = life.engine.scheduler.holdings.snapshots
    assert snapshots.free == snapshots.total


@pytest.mark.parametrize("phase", ["PREFILL", "DECODE"])
def test_whoever_is_cancelled_leaves_the_others_the_state(
    folder: Path, alone: dict[int, list[int]], phase: str
) -> None:
    life = life_of(folder, 3, max_rows=3, num_blocks=17, prefix_cache=False, prefill_chunk=8, max_prefill_tokens=8)
    for i, prompt in enumerate(PROMPTS):
        ask(life, 10 * i + 1, prompt, 5, n=N)
    found = life.run(phase)
    life.device.close()
    assert life.cancelled > 0
    for handle, expected in alone.items():
        assert found.get(handle, []) == expected[: len(found.get(handle, []))]
        assert handle == life.cancelled or found[handle] == expected
    snapshots = life.engine.scheduler.holdings.snapshots
    assert snapshots.free == snapshots.total


def test_a_state_goes_back_to_its_slot_where_the_others_have_ended_meanwhile(folder: Path) -> None:
    """The first completion's state is in a snapshot when nobody else wants the prompt any more."""
    life = life_of(folder, 1, max_rows=3, num_blocks=40, prefix_cache=False, prefill_chunk=8, max_prefill_tokens=8)
    ask(life, 1, PROMPTS[3], 5, n=2)
    life.engine.turn()
    life.engine.turn()
    life.links.tell(1, m.Cancel(2))
    life.run()
    life.device.close()
    slots = life.engine.scheduler.holdings.state_slots
    assert slots.free == slots.total


def test_a_barrier_finds_the_snapshots_of_a_row_whose_record_was_sent_again(folder: Path) -> None:
    life = life_of(
        folder, 2, max_rows=3, num_blocks=60, prefill_chunk=8, max_prefill_tokens=8, state_snapshot_blocks=2,
        state_snapshots=16,
    )  # fmt: skip
    ask(life, 1, PROMPTS[3], 5, n=2)
    for _ in range(14):
        life.engine.turn()
        life.engine.drain("logging")
    assert life.engine.stats().running == 2
    life.run()
    life.device.close()
