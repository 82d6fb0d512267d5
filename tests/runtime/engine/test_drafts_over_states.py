"""Drafts of rows with recurrent states: with `ngram` every row has the tokens that it gets alone and without drafts, at
every depth, in a pool that is too small for its rows, and so has whoever begins behind a cached prefix."""

from __future__ import annotations

from pathlib import Path

import pytest

from runahead.runtime.row_record import token_mask
from runahead.runtime.wire.parameters import SamplingParams
from tests.runtime.engine.test_recurrent_rows import Life
from tests.runtime.models.checkpoints import CASES, save

# Rows that may say four tokens alone: greedy ones repeat themselves, and of those that draw every third draft is right.
ALLOWED = token_mask((3, 40, 77, 120), 160).tobytes()
PROMPTS = [[(31 * i + 7 * j % 5) % 150 for j in range(length)] for i, length in enumerate((21, 40, 9, 33, 26))]
TOKENS = 40
FAMILIES = ("bamba_groups", "granite_hybrid", "qwen3_next")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save(next(case for case in CASES if case.name == request.param), path)
    return path


def sampling_of(handle: int) -> SamplingParams:
    return SamplingParams(temperature=0.8 * (handle % 2), seed=handle, allowed_mask=ALLOWED)


def lived(folder: Path, depth: int, **settings: object) -> Life:
    life = Life(folder, depth, **settings)  # type: ignore[arg-type]
    for handle, prompt in enumerate(PROMPTS):
        life.ask(handle, prompt, TOKENS, sampling_of(handle))
    life.run()
    for handle, prompt in enumerate(PROMPTS):
        life.ask(10 + handle, prompt, TOKENS, sampling_of(handle))
    life.run()
    life.device.close()
    return life


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, list[int]]:
    return lived(folder, 0, max_rows=1, num_blocks=40, prefix_cache=False).said()


@pytest.mark.parametrize("depth", [0, *(pytest.param(depth, marks=pytest.mark.large) for depth in (1, 2)), 4])
def test_rows_have_the_tokens_that_they_get_alone_and_without_drafts(
    folder: Path, alone: dict[int, list[int]], depth: int
) -> None:
    life = lived(folder, depth, drafter="ngram", draft_tokens=4, state_snapshots=40, state_snapshot_blocks=1)
    assert life.said() == alone
    stats = life.engine.stats()
    assert sum(stats.accepted.values()) > 50 and sum(stats.drafted.values()) > sum(stats.accepted.values())
    assert stats.events["evicted"].count > 0 and stats.events["paused"].count > 0
    assert stats.snapshots_found > 0 and stats.cached_tokens > 0
