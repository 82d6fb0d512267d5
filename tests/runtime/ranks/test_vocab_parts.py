"""Ranks on CPUs that sample together, each from its part of the logits: the tokens of the whole logits, to the bit."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from runahead.cuda_graphs.device import Form
from runahead.runtime.kernels.ranks import Ranks
from runahead.runtime.kernels.reference.sampling import sample_rows
from runahead.runtime.kernels.reference.vocab_parts import sample_part
from runahead.runtime.ranks.exchange import HostRanks
from runahead.runtime.wire.parameters import SamplingParams
from tests.runtime.kernels.sampling_oracle import RowSpec, penalties_of, state_of
from tests.runtime.models.checkpoints import CASES, save
from tests.runtime.ranks.host_ranks import on_each, ranks_of
from tests.runtime.ranks.rank_engines import life

ROWS = 24


def drawn_logits(vocab: int) -> torch.Tensor:
    """Some with ties in several parts, some not finite in one part."""
    logits = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(vocab)) * 3.0
    logits[::3] = (logits[::3] * 0.4).round()
    logits[1], logits[2, vocab - 2 :] = -0.0, 50.0
    logits[1, ::5] = 0.0
    logits[4, vocab - 1], logits[5, 0], logits[7, vocab // 2] = float("nan"), float("inf"), float("-inf")
    return logits


SPECS = [
    RowSpec(temperature=(0.0, 0.7, 1.0, 30.0, 1e-9)[row % 5], seed=row, position=3 * row, alive=row != 9)
    for row in range(ROWS)
]


@pytest.mark.parametrize(
    ("of", "vocab", "sampled"),
    [(2, 5000, 5000), (3, 3 * 67, 3 * 67), (4, 4 * 30, 4 * 30), (4, 4 * 30, 37), (2, 2 * 70000, 2 * 70000)],
    ids=["2", "3, blocks of noise in two parts", "4", "4, two without a token", "2, more than is drawn at once"],
)
def test_ranks_choose_the_tokens_of_the_whole_vocabulary(of: int, vocab: int, sampled: int) -> None:
    logits, state, slots = drawn_logits(vocab), state_of(SPECS, vocab), np.arange(ROWS)
    if sampled < vocab:
        logits[:, sampled:] = 60.0
    whole = sample_rows(
        logits[:, :sampled], state, penalties_of(SPECS, vocab), torch.from_numpy(slots), Form.PLAIN, 0
    )  # fmt: skip
    assert 0 < whole.finite.tolist().count(False) <= 3
    width = vocab // of

    def work(ranks: Ranks) -> tuple[list[int], list[bool]]:
        assert isinstance(ranks, HostRanks)
        first = ranks.shard.rank * width
        own = logits[:, first : min(first + width, sampled)].numpy()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = sample_part(own, state, slots, first, ranks.collect)
        return found.tokens.tolist(), found.finite.tolist()

    assert on_each(ranks_of(of, 40), work) == [(whole.tokens.tolist(), whole.finite.tolist())] * of
    if sampled == vocab:
        chosen = {token // width for token, spec in zip(whole.tokens.tolist(), SPECS, strict=True) if spec.temperature}
        assert chosen == set(range(of)), "tokens of every part were drawn"


def test_a_rank_has_what_every_rank_has_said() -> None:
    def work(ranks: Ranks) -> list[int]:
        assert isinstance(ranks, HostRanks)
        found = [ranks.collect(np.full((count, 3), 10 * count + ranks.shard.rank, np.int32)) for count in (1, 40, 0, 2)]
        assert [each.shape for each in found] == [(3, 1, 3), (3, 40, 3), (3, 0, 3), (3, 2, 3)]
        return [int(part.flat[at]) for each in found for part in each if part.size for at in (0, -1)]

    expected = [10 * count + rank for count in (1, 40, 2) for rank in range(3) for _ in range(2)]
    assert on_each(ranks_of(3), work) == [expected] * 3


def test_logits_of_plain_rows_stay_on_their_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all kinds, then plain ones: no logits are gathered for those."""
    gathered: list[int] = []
    gather = HostRanks.gather

    def counted(ranks: HostRanks, part: torch.Tensor) -> torch.Tensor:
        gathered.append(part.shape[0])
        return gather(ranks, part)

    monkeypatch.setattr(HostRanks, "gather", counted)
    save(next(case for case in CASES if case.name == "llama"), tmp_path)
    plain = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=5))
    own = life(tmp_path, 2, monkeypatch, ranks=2, threads=True, num_blocks=120)
    for handle, asked in enumerate(plain):
        own.ask(handle, range(10 + handle), 20, asked)
    own.run()
    assert not gathered
    own.ask(2, range(12), 20, plain[1])
    own.ask(3, range(13), 8, SamplingParams(temperature=0.8, seed=6, top_k=9))
    own.run()
    own.close()
    assert len(gathered) >= 2 * 8
    alone = life(tmp_path, 0, monkeypatch, segments=2, num_blocks=120)
    for handle, asked in enumerate((*plain, plain[1])):
        alone.ask(handle, range(10 + handle), 20, asked)
    alone.ask(3, range(13), 8, SamplingParams(temperature=0.8, seed=6, top_k=9))
    alone.run()
    alone.close()
    assert own.said() == alone.said()
