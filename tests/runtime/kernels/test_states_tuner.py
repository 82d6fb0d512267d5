"""The tuner of recurrent states: its kernels run on what it makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from benchmarks.tune.states import NAMES, Bench, mixer_of, tilings  # noqa: E402
from runahead.runtime.kernels.layers import GatedDelta, Mamba2  # noqa: E402
from runahead.runtime.kernels.triton.state_tiling import STATES, StateTiling  # noqa: E402
from tests.runtime.kernels.recurrent_mixers import DELTA, MAMBA2  # noqa: E402
from tests.runtime.kernels.recurrent_mixers import mixer_of as small_mixer  # noqa: E402

FURTHER = ((MAMBA2[1], 2), (DELTA[1], 0))  # each mixer, and launches with drafts, have another case


@pytest.mark.parametrize("name", NAMES)
def test_each_shape_has_a_recurrent_mixer(name: str) -> None:
    assert isinstance(mixer_of(name), GatedDelta if "delta" in name else Mamba2)


@pytest.mark.parametrize(
    ("shape", "drafts"),
    [(MAMBA2[1], 0), (DELTA[1], 2), *(pytest.param(*case, marks=pytest.mark.large) for case in FURTHER)],
)
def test_states_cut_otherwise_are_the_same_within_rounding(shape: object, drafts: int) -> None:
    mixer = small_mixer(shape)  # type: ignore[arg-type]
    bench = Bench(replace(mixer), 3, drafts, DEVICE, most_layers=2)
    usual = bench.left(STATES)
    assert all(tensor.isfinite().all() for tensor in usual) and usual[0].any()
    assert torch.equal(bench.left(STATES)[0], usual[0]), "the states were put back"
    for tiling in (StateTiling(64, 1), StateTiling(256, 8)):
        for found, expected in zip(bench.left(tiling), usual, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=str(tiling))
    bench.run(STATES)
    assert bench.floor_us > 0


def test_there_are_ways_beside_the_default() -> None:
    found = list(tilings())
    assert len(found) > 8 and STATES in found
