"""Rows that ranks sample together, each from its part of the logits: the tokens of the whole logits, to the bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.runtime.kernels.sampling_oracle import RowSpec, penalties_of, state_of
from tests.runtime.kernels.triton_device import on, triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.device import Form  # noqa: E402
from runahead.runtime.kernels.triton.sampling.sampler import (  # noqa: E402
    make_sampler_buffers,
    make_vocab_part,
    sample_rows_cuda,
)
from tests.runtime.kernels.divided_programs import GpuSegment  # noqa: E402
from tests.runtime.kernels.test_sampling_triton import random_logits  # noqa: E402
from tests.runtime.ranks.segments import Turns  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

Tokens = tuple[list[int], list[bool]]


def together(logits: torch.Tensor, specs: list[RowSpec], ranks: int, sampled_vocab: int | None = None) -> list[Tokens]:
    """Tokens and finite flags: found with the whole logits, then by each rank, in rank order."""
    rows, vocab = logits.shape
    width, slots = vocab // ranks, torch.arange(rows).to(DEVICE)
    state, penalties = on(DEVICE, state_of(specs, vocab)), on(DEVICE, penalties_of(specs, vocab))
    turns = Turns(ranks)

    def of(own: torch.Tensor, exchange: GpuSegment | None) -> Tokens:
        buffers, part = make_sampler_buffers(rows, vocab, 1, DEVICE, sampled_vocab), None
        if exchange is not None:
            turns.wait_for(exchange.shard.rank)
            part = make_vocab_part(exchange, width, buffers)
            assert part is not None
            buffers = part.buffers
        found = sample_rows_cuda(own.to(DEVICE), state, penalties, slots, Form.PLAIN, buffers, part=part)
        if exchange is not None:
            turns.pass_on(exchange.shard.rank)
        return found.tokens.tolist(), found.finite.tolist()

    whole = of(logits.clone(), None)
    with ThreadPoolExecutor(ranks) as threads:
        pieces = [piece.contiguous() for piece in logits.split(width, 1)]
        running = [threads.submit(of, own, GpuSegment(turns, rank)) for rank, own in enumerate(pieces)]
        return [whole, *(one.result() for one in running)]


@pytest.mark.parametrize(("ranks", "vocab"), [(2, 2 * 2500), (3, 3 * 84), (4, 4 * 2048)])
def test_ranks_choose_the_tokens_of_the_whole_vocabulary(ranks: int, vocab: int) -> None:
    """Greedy and drawn, with ties in the parts of several ranks, and logits that are not finite in one of them."""
    rows = 24
    logits = random_logits(rows, vocab, seed=vocab)
    logits[::3] = (logits[::3] * 0.4).round()
    logits[1], logits[2, vocab - 2 :] = 0.0, 50.0
    logits[4, vocab - 1], logits[5, 0], logits[7, vocab // 2] = float("nan"), float("inf"), float("-inf")
    specs = [
        RowSpec(temperature=(0.0, 0.7, 1.0, 30.0)[row % 4], seed=row, position=3 * row, alive=row != 9)
        for row in range(rows)
    ]
    expected, *found = together(logits, specs, ranks)
    assert expected[1].count(False) == 3
    assert found == [expected] * ranks
    chosen = [expected[0][row] * ranks // vocab for row in range(rows) if specs[row].temperature and expected[1][row]]
    assert set(chosen) == set(range(ranks)), "tokens of every rank were drawn"


def test_ids_that_may_not_be_sampled_are_those_of_the_whole_vocabulary() -> None:
    logits = random_logits(8, 200, seed=4)
    logits[:, 90:] += 9.0
    specs = [RowSpec(temperature=float(row % 2), seed=row) for row in range(8)]
    for sampled_vocab in (94, 150):
        expected, *found = together(logits, specs, 2, sampled_vocab)
        assert max(expected[0]) < sampled_vocab and found == [expected] * 2


def test_a_part_that_cuts_a_block_of_noise_is_not_sampled_by_itself() -> None:
    turns = Turns(2)
    assert make_vocab_part(GpuSegment(turns, 1), 86, make_sampler_buffers(1, 172, 1, DEVICE)) is None
