"""Rows with recurrent states and the head of their own checkpoint: each row has the tokens that it gets alone and
without drafts, at every depth, and its head is right as often however the row came where it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import SamplingParams
from tests.runtime.engine.test_recurrent_rows import Life
from tests.runtime.models.qwen_heads import HEADED, save_foreseen_qwen

PROMPTS = [[(31 * i + 7 * j % 5) % 150 for j in range(length)] for i, length in enumerate((21, 40, 9, 33, 26))]
TOKENS = 40
NOISE = 0.04  # the head is right of some tokens, and wrong of others
HEAD = {"drafter": "mtp", "draft_tokens": 4, "state_snapshots": 40, "state_snapshot_blocks": 1}


@pytest.fixture(scope="module", params=["qwen3_next", pytest.param("qwen3_5", marks=pytest.mark.large)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, case = tmp_path_factory.mktemp(request.param), HEADED[request.param]
    # A model whose matrices are tied would say one token again and again.
    case = replace(case, changes={**case.changes, "tie_word_embeddings": False})
    save_foreseen_qwen(path, case=case, noise=NOISE)
    return path


def sampling_of(handle: int) -> SamplingParams:
    return SamplingParams(temperature=0.8 * (handle % 2), seed=handle)


def lived(folder: Path, depth: int, settings: Mapping[str, object]) -> Life:
    """Requests side by side, and the same once more."""
    life = Life(folder, depth, **settings)  # type: ignore[arg-type]
    for again in (0, 10):
        for handle, prompt in enumerate(PROMPTS):
            life.ask(again + handle, prompt, TOKENS, sampling_of(handle))
        life.run()
    life.device.close()
    return life


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, list[int]]:
    return lived(folder, 0, {"max_rows": 1, "num_blocks": 40, "prefix_cache": False}).said()


@pytest.mark.parametrize("depth", [0, *(pytest.param(depth, marks=pytest.mark.large) for depth in (1, 2)), 4])
def test_rows_have_the_tokens_that_they_get_alone_and_without_drafts(
    folder: Path, alone: dict[int, list[int]], depth: int
) -> None:
    life = lived(folder, depth, HEAD)
    assert life.said() == alone
    stats = life.engine.stats()
    accepted, drafted = sum(stats.accepted.values()), sum(stats.drafted.values())
    assert 40 < accepted < drafted - 40, "some were right, and some were wrong"
    assert stats.events["evicted"].count > 0 and stats.events["paused"].count > 0
    assert stats.snapshots_found > 0 and stats.cached_tokens > 0


class Asked:
    """Requests that come one after the other: what each said, how many of its drafts were looked at and right, and how
    many of its tokens were found."""

    def __init__(self, folder: Path, depth: int, chunk: int) -> None:
        sizes = {"draft_tokens": 3, "prefill_chunk": chunk, "max_prefill_tokens": chunk, "max_rows": 2}
        self.life = Life(folder, depth, **{**HEAD, **sizes, "num_blocks": 100})  # type: ignore[arg-type]
        self.count = 0

    def __call__(self, prompt: list[int], temperature: float, salt: str = "") -> tuple[list[int], tuple[int, int], int]:
        self.count += 1
        self.life.ask(self.count, prompt, TOKENS, SamplingParams(temperature=temperature, seed=3), salt)
        said = self.life.run()[self.count]
        outputs = [message for _, message in self.life.links.sent if isinstance(message, m.Output)]
        (end,) = (end for output in outputs for end in output.finished if end.handle == self.count)
        return said, (sum(end.drafted), sum(end.accepted)), end.cached_tokens


def test_acceptance_is_that_of_a_cold_start(folder: Path) -> None:
    """Behind a cached prompt, behind a prefix that was drafted, and however a prompt is cut."""
    counts: dict[int, list[tuple[int, int]]] = {}
    for depth, chunk in ((0, 64), (2, 8)):
        asked = Asked(folder, depth, chunk)
        found = counts.setdefault(depth, [])
        for number, temperature in enumerate((0.0, 0.8)):
            prompt = [100 + number, *PROMPTS[1]]
            first, again = asked(prompt, temperature), asked(prompt, temperature)
            assert (first[2], again[2]) == (0, 40) and again[:2] == first[:2]
            longer = [*prompt, *first[0][:30]]
            warm, cold = asked(longer, temperature), asked(longer, temperature, "another")
            assert (warm[2], cold[2]) == (64, 0) and warm[:2] == cold[:2]
            found += [first[1], warm[1]]
        asked.life.device.close()
    assert counts[0] == counts[2]
    assert all(0 < right < looked_at for looked_at, right in counts[0])
