"""The borders of top-k and top-p in Triton: the tokens that the reference leaves, for rows that make a search hard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.runtime.kernels.sampling_oracle import RowSpec, penalties_of, state_of
from tests.runtime.kernels.triton_device import on, triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.device import Form  # noqa: E402
from runahead.runtime.kernels.reference.sampling import sample_rows  # noqa: E402
from runahead.runtime.kernels.reference.sampling_filters import kept_tokens  # noqa: E402
from runahead.runtime.kernels.triton.sampling.parameters import TILE  # noqa: E402
from runahead.runtime.kernels.triton.sampling.sampler import make_sampler_buffers, sample_rows_cuda  # noqa: E402
from runahead.runtime.kernels.triton.sampling.threshold_bracket import LADDER  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

F32 = NDArray[np.float32]
NEARLY_1: Final = float(np.nextafter(np.float32(1), np.float32(0)))
BLOCK: Final = 4096  # tokens of a list that the search looks at in one step
MANY: Final = 2 * BLOCK + 811  # a vocabulary whose longest list takes three steps, and which fills several tiles


def scores_of(logits: torch.Tensor, temperature: float) -> F32:
    """Of one row's logits, [vocab], as the reference computes them."""
    row: F32 = logits.numpy()
    scores: F32 = (row - row.max()) / np.float32(temperature)
    return scores


def lengths_of_lists(logits: torch.Tensor, specs: list[RowSpec]) -> list[int]:
    """Sample rows with a border each, compare what is left and what is drawn with the reference, and return how many
    tokens were listed of each row."""
    vocab_size = logits.shape[1]
    state, penalties, slots = state_of(specs, vocab_size), penalties_of(specs, vocab_size), torch.arange(len(specs))
    expected = sample_rows(logits, state, penalties, slots, Form.FULL, 1)
    buffers = make_sampler_buffers(len(specs), vocab_size, 1, DEVICE)
    buffers.listed.fill_(-1)
    buffers.list_lengths.fill_(-1)
    buffers.threshold_sums.fill_(1 << 60)  # nothing may be read that was not written
    found = sample_rows_cuda(
        logits.to(DEVICE), on(DEVICE, state), on(DEVICE, penalties), slots.to(DEVICE), Form.FULL, buffers
    )
    ids = np.arange(vocab_size)
    for row, spec in enumerate(specs):
        scores = scores_of(logits[row], spec.temperature)
        keys = scores.view(np.int32) & 0x7FFFFFFF
        key, last = int(buffers.threshold_key[row]), int(buffers.threshold_id[row])
        left = ids[(keys < key) | ((keys == key) & (ids <= last))]
        kept = kept_tokens(scores, spec.top_k, np.float32(spec.top_p), np.float32(0.0))
        assert left.tolist() == sorted(kept.tolist()), spec
    assert found.tokens.tolist() == expected.tokens.tolist()
    lists, lengths = buffers.listed.cpu().numpy(), buffers.list_lengths.cpu().numpy()
    for row, of_tiles in zip(lists, lengths, strict=True):
        assert (np.diff(row[row >= 0]) > 0).all()  # nothing listed twice
        for tile, length in enumerate(of_tiles.tolist()):
            own = row[tile * TILE : (tile + 1) * TILE]
            assert (own[:length] // TILE == tile).all()
            assert (own[length:] == -1).all()  # no gap
    return (lists >= 0).sum(axis=1).tolist()


def normal(scale: float) -> Callable[[np.random.Generator, int], NDArray[np.float64]]:
    return lambda random, size: random.standard_normal(size) * scale


def one_of_two_values(random: np.random.Generator, size: int) -> NDArray[np.float64]:
    return np.where(random.random(size) < 0.4, 1.25, -1.0)


def exponentially_spaced(random: np.random.Generator, size: int) -> NDArray[np.float64]:
    return -random.permutation(np.exp2(np.linspace(-60.0, 6.0, size)))


def a_few_hold_all(random: np.random.Generator, size: int) -> NDArray[np.float64]:
    logits = random.standard_normal(size) - 40.0
    logits[random.choice(size, min(5, size), replace=False)] = (0.0, -0.5, -0.5, -1.0, -3.0)[: min(5, size)]
    return logits


def with_few_masses(random: np.random.Generator, size: int) -> NDArray[np.float64]:
    """Most are so unlikely that their mass is 0."""
    return np.where(np.arange(size) % 3 == 0, random.integers(-3, 1, size), random.uniform(-60.0, -27.9, size))


def dense_far_below(random: np.random.Generator, size: int) -> NDArray[np.float64]:
    return -np.log(random.permutation(size) + 1.0)


SHAPES: Final = {
    "all alike": lambda random, size: np.full(size, 3.25),
    "two values": one_of_two_values,
    "ties": lambda random, size: (random.standard_normal(size) * 2).round(),
    "exponential": exponentially_spaced,
    "a few hold all": a_few_hold_all,
    "few masses": with_few_masses,
    "dense far below": dense_far_below,
    "narrow": normal(1e-3),
    "flat": normal(0.8),
    "steep": normal(20.0),
}


def logits_of(shape: str, rows: int, vocab_size: int) -> torch.Tensor:
    random = np.random.default_rng(sorted(SHAPES).index(shape))
    rows_of = [SHAPES[shape](random, vocab_size) for _ in range(rows)]
    return torch.from_numpy(np.stack(rows_of).astype(np.float32))


def with_seeds(specs: list[RowSpec]) -> list[RowSpec]:
    return [replace(spec, seed=100 + place, position=place) for place, spec in enumerate(specs)]


@pytest.mark.parametrize("shape", list(SHAPES))
def test_what_is_left_is_what_the_reference_leaves(shape: str) -> None:
    vocab_size = 50
    shares = (1e-50, 0.0, 0.3, 0.9, 0.999, NEARLY_1)
    limits = (1, 2, vocab_size // 2, vocab_size - 1)
    specs = [RowSpec(temperature=1.0, top_p=share) for share in shares]
    specs += [RowSpec(temperature=0.7, top_k=limit) for limit in limits]
    specs += [RowSpec(temperature=1.3, top_k=limit, top_p=share) for limit in limits[1:] for share in (0.0, 0.6, 0.95)]
    specs += [RowSpec(temperature=1.0, top_k=vocab_size, top_p=0.5)]
    lengths_of_lists(logits_of(shape, len(specs), vocab_size), with_seeds(specs))


@pytest.mark.parametrize("shape", list(SHAPES))
def test_what_is_left_of_two_tiles_is_what_the_reference_leaves(shape: str) -> None:
    vocab_size = 2049
    specs = [
        RowSpec(temperature=1.0, top_p=0.9),
        RowSpec(temperature=1.0, top_p=NEARLY_1),
        RowSpec(temperature=0.7, top_k=vocab_size - 1),
        RowSpec(temperature=1.3, top_k=600, top_p=0.8),
    ]
    lengths_of_lists(logits_of(shape, len(specs), vocab_size), with_seeds(specs))


@pytest.mark.parametrize("shape", ["ties", "few masses", "dense far below", "flat"])
def test_what_is_left_of_many_tiles_is_what_the_reference_leaves(shape: str) -> None:
    specs = [
        RowSpec(temperature=1.0, top_p=0.9),
        RowSpec(temperature=1.0, top_k=5000),
        RowSpec(temperature=1.0, top_k=7000, top_p=0.8),
    ]
    lengths_of_lists(logits_of(shape, len(specs), MANY), with_seeds(specs))


def test_a_row_of_ties_is_cut_at_the_right_one_of_them_however_many_tiles_they_fill() -> None:
    specs = [RowSpec(temperature=1.0, top_p=0.75), RowSpec(temperature=1.0, top_k=7_777)]
    lengths = lengths_of_lists(torch.zeros(len(specs), MANY), with_seeds(specs))
    assert lengths == [MANY, MANY]


def test_a_guess_that_is_far_off_makes_the_list_longer_and_changes_nothing() -> None:
    logits = logits_of("narrow", 2, MANY) * 1e-3  # all within a fraction of the first rung
    lengths = lengths_of_lists(
        logits, with_seeds([RowSpec(temperature=1.0, top_p=0.9), RowSpec(temperature=1.0, top_k=3000)])
    )
    assert min(lengths) > 2 * BLOCK


def test_the_list_of_a_row_is_short_where_its_logits_are_spread_as_usual() -> None:
    specs = with_seeds([RowSpec(temperature=0.8, top_p=share) for share in (0.5, 0.8, 0.9, 0.95)])
    assert max(lengths_of_lists(logits_of("flat", len(specs), MANY) * 0.8, specs)) < MANY // 10


def test_the_list_is_short_where_the_border_is_right_beside_a_rung_of_the_ladder() -> None:
    """Of which a sample can't tell on which side the border is."""
    logits = logits_of("flat", 1, MANY)
    scores = scores_of(logits[0], 0.8).astype(np.float64)
    weights = np.exp(scores)
    rungs = [rung for rung in LADDER if 1.5 <= rung <= 4.0]
    shares = [weights[-scores <= rung + side].sum() / weights.sum() for rung in rungs for side in (-0.002, 0.002)]
    specs = with_seeds([RowSpec(temperature=0.8, top_p=float(share)) for share in shares])
    assert len(specs) > 8
    assert max(lengths_of_lists(logits.repeat(len(specs), 1), specs)) < MANY // 10


def test_rows_beside_each_other_take_their_own_borders() -> None:
    """Programs are shared out among the rows that draw, among those with a border and among the edited ones."""
    vocab_size, random = 4100, np.random.default_rng(5)
    specs = []
    for place in range(24):
        spec = RowSpec(seed=place, position=place, temperature=(0.0, 1.0, 0.9)[place % 3], alive=place % 7 != 0)
        spec = replace(spec, top_p=(1.0, 0.8)[place % 2], logprobs=(-1, 2)[place % 5 == 0])
        specs.append(replace(spec, bias=((int(random.integers(vocab_size)), 4.0),) if place % 4 == 1 else ()))
    logits = torch.from_numpy(random.standard_normal((len(specs), vocab_size)).astype(np.float32))
    state, penalties = state_of(specs, vocab_size), penalties_of(specs, vocab_size)
    slots = torch.arange(len(specs))
    expected = sample_rows(logits, state, penalties, slots, Form.FULL, 2)
    buffers = make_sampler_buffers(32, vocab_size, 2, DEVICE)
    buffers.kinds.fill_(-1)  # of rows that the launch does not have
    found = sample_rows_cuda(
        logits.to(DEVICE), on(DEVICE, state), on(DEVICE, penalties), slots.to(DEVICE), Form.FULL, buffers
    )
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.logprob is not None
    torch.testing.assert_close(found.logprob.cpu(), expected.logprob, atol=1e-6, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("vocab_size", [151_936, 262_144])
def test_what_is_left_of_a_large_vocabulary_is_what_the_reference_leaves(shape: str, vocab_size: int) -> None:
    specs = [RowSpec(temperature=0.8, top_p=share) for share in (0.0, 0.5, 0.9, 0.99, NEARLY_1)]
    specs += [RowSpec(temperature=0.8, top_k=limit) for limit in (1, 50, 1000, vocab_size // 2, vocab_size - 1)]
    specs += [RowSpec(temperature=0.8, top_k=limit, top_p=0.9) for limit in (50, 1000, vocab_size // 2)]
    lengths_of_lists(logits_of(shape, len(specs), vocab_size), with_seeds(specs))
