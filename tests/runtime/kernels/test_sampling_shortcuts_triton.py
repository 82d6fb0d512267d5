"""What the sampler in Triton leaves out: divisions, noise of tokens that can't win, tiles that are not looked at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.runtime.kernels.sampling_oracle import RowSpec, penalties_of, state_of
from tests.runtime.kernels.triton_device import on, triton_device

DEVICE = triton_device()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from runahead.cuda_graphs.device import Form  # noqa: E402
from runahead.runtime.kernels.reference.philox import exp32  # noqa: E402
from runahead.runtime.kernels.reference.sampling import sample_rows  # noqa: E402
from runahead.runtime.kernels.reference.sampling_filters import masses  # noqa: E402
from runahead.runtime.kernels.triton.sampling import parameters  # noqa: E402
from runahead.runtime.kernels.triton.sampling.parameters import TILE  # noqa: E402
from runahead.runtime.kernels.triton.sampling.sampler import make_sampler_buffers, sample_rows_cuda  # noqa: E402
from runahead.runtime.kernels.triton.sampling.scores import inverse_of, limbs_of, mass_of_limbs, scores_of  # noqa: E402
from tests.runtime.kernels.test_sampling_borders_triton import lengths_of_lists, logits_of  # noqa: E402
from tests.runtime.kernels.test_sampling_triton import agrees, random_logits  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

FAR = -40.0  # a logit of a token that is never left


@triton.jit
def _score_kernel(x, peak, heat, scores, sums, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    top, divisor = tl.load(peak), tl.load(heat)
    score = scores_of(tl.load(x + i), top, divisor, inverse_of(divisor, top))
    tl.store(scores + i, score)
    upper, lower = limbs_of(score)
    tl.store(sums + i, mass_of_limbs(upper, lower))


@pytest.mark.parametrize("heat", [0.8, 0.7, 1.0, 1.0 + 2.0**-23, 2.0 - 2.0**-23, 1e-3, 1e9, 1e-20, 1e20, 2e-38])
@pytest.mark.parametrize("peak", [3.7, 0.0, 2.0**-100])
def test_scores_are_quotients_and_masses_those_of_the_reference_to_the_bit(heat: float, peak: float) -> None:
    generator = torch.Generator().manual_seed(1)
    size = 1 << 15
    steps = torch.rand(size, generator=generator) * torch.exp2(torch.rand(size, generator=generator) * 60 - 50)
    x = torch.tensor(peak, dtype=torch.float32) - steps
    x[:2] = torch.tensor([peak, float(np.nextafter(np.float32(peak), np.float32(-1)))])
    scores, sums = torch.zeros(size, device=DEVICE), torch.zeros(size, dtype=torch.int64, device=DEVICE)
    top, divisor = torch.tensor([peak], device=DEVICE), torch.tensor([heat], device=DEVICE)
    with np.errstate(over="ignore"):
        _score_kernel[(8,)](x.to(DEVICE), top, divisor, scores, sums, BLOCK=size // 8, enable_fp_fusion=False)
        expected = (x.numpy() - np.float32(peak)) / np.float32(heat)
    assert scores.cpu().numpy().tobytes() == expected.tobytes()
    assert np.array_equal(sums.cpu().numpy(), masses(exp32(expected)))


def test_a_race_that_nobody_has_won_in_time_is_run_again() -> None:
    """Eight tokens are left for certain. At the first three positions all arrive so late that none was looked at."""
    vocab_size, late = 40, (56_592, 111_106, 138_551)
    specs = [RowSpec(temperature=1.0, top_p=0.995, seed=7, position=position) for position in (*late, 1, 2, 3)]
    logits = torch.full((len(specs), vocab_size), -6.0)
    logits[:, :8] = -0.01 * torch.arange(8)
    state, penalties, slots = state_of(specs, vocab_size), penalties_of(specs, vocab_size), torch.arange(len(specs))
    expected = sample_rows(logits, state, penalties, slots, Form.FULL, 1)
    buffers = make_sampler_buffers(len(specs), vocab_size, 1, DEVICE)
    found = sample_rows_cuda(
        logits.to(DEVICE), on(DEVICE, state), on(DEVICE, penalties), slots.to(DEVICE), Form.FULL, buffers
    )
    assert (buffers.best_score[:, 0] == float("-inf")).tolist() == [True] * 3 + [False] * 3
    assert max(expected.tokens.tolist()) < 8
    assert found.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("programs", [3, 7])
def test_programs_that_take_many_tiles_find_what_one_a_tile_finds(
    monkeypatch: pytest.MonkeyPatch, programs: int
) -> None:
    monkeypatch.setattr(parameters, "_PROGRAMS", programs)
    vocab_size = 4 * TILE + 811
    specs = [
        RowSpec(temperature=0.8, top_p=0.9, seed=1, position=5),
        RowSpec(temperature=1.0, top_k=3000, seed=2, position=6),
        RowSpec(temperature=1.3, top_k=600, top_p=0.8, seed=3, position=7),
    ]
    lengths_of_lists(logits_of("flat", 3, vocab_size), specs)
    unlimited = [RowSpec(temperature=heat, min_p=share, seed=4) for heat, share in ((0.1, 0.0), (0.8, 0.0), (0.8, 0.1))]
    agrees(logits_of("flat", 3, vocab_size), unlimited)


@pytest.mark.parametrize("tile", [0, 1, 3])
def test_all_that_is_left_may_lie_in_one_tile(tile: int) -> None:
    """The last is a short one."""
    vocab_size = 3 * TILE + 5
    logits = torch.full((3, vocab_size), FAR)
    logits[:, tile * TILE : tile * TILE + 5] = torch.tensor([-0.5, -1.0, 0.0, -0.5, -3.0])
    specs = [RowSpec(temperature=1.0, top_p=share, seed=5, position=place) for place, share in enumerate((0.9, 0.97))]
    specs.append(RowSpec(temperature=1.0, top_k=4, seed=5))
    lengths = lengths_of_lists(logits, specs)
    assert max(lengths) <= 5


def test_a_tile_that_has_tokens_about_the_border_alone_is_listed() -> None:
    vocab_size = 2 * TILE
    logits = torch.full((1, vocab_size), FAR)
    logits[0, :8] = -0.01 * torch.arange(8)
    logits[0, TILE + 300 : TILE + 332] = -6.0
    assert lengths_of_lists(logits, [RowSpec(temperature=1.0, top_p=0.995, seed=7)]) == [32]


def test_one_row_of_any_kind_beside_greedy_ones_is_that_of_the_reference() -> None:
    vocab_size = TILE + 3
    greedy = RowSpec()
    kinds = [
        RowSpec(temperature=0.8, top_p=0.9),
        RowSpec(temperature=0.8, top_k=40),
        RowSpec(temperature=0.8, min_p=0.05),
        RowSpec(temperature=0.8, top_p=0.9, min_p=0.05),
        RowSpec(temperature=0.8, top_p=0.9, repetition=1.3, said=(3, TILE + 1)),
        RowSpec(temperature=0.8, top_p=0.9, allowed=(TILE + 2,)),
        RowSpec(temperature=0.8, top_p=0.9, alive=False),
    ]
    for place, kind in enumerate(kinds):
        specs = [greedy, replace(kind, seed=place, position=place + 1), greedy]
        agrees(random_logits(3, vocab_size, seed=place, scale=0.7), specs)
    tied, broken = torch.zeros(3, vocab_size), random_logits(3, vocab_size, seed=9)
    broken[1, TILE + 1] = float("nan")
    for logits in (tied, broken):
        agrees(logits, [greedy, kinds[0], greedy])
