"""Whole engines with a draft head, S, apply, the head's steps and F in Triton: drafts change no token, and as many are
right as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime.kernels.matrix_units import multiply_as_matrix_units
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = [
    pytest.mark.timeout(600),  # a whole engine in Triton's interpreter takes its time
    # Lines that no row needs hold whatever memory held: nobody reads what is computed of them.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

from runahead.cuda_graphs.device import Form, LaunchShape  # noqa: E402
from tests.runtime.kernels.headed_engine import (  # noqa: E402
    KINDS,
    OVER_STATES,
    cpu_engine,
    served,
    triton_engine,
    write_pair,
)

LARGE = pytest.mark.large
DEPTHS = (0, 1, 2, 4)


@pytest.mark.parametrize(
    ("kind", "depths"),
    [("eagle-3", (2,)), *(pytest.param(kind, DEPTHS, marks=LARGE, id=f"{kind}, every depth") for kind in KINDS)],
)
def test_tokens_are_those_without_drafts_and_right_drafts_those_of_the_cpu(
    kind: str, depths: tuple[int, ...], tmp_path: Path
) -> None:
    write_pair(tmp_path, kind)
    plain, expected = (served(cpu_engine(tmp_path, 2, drafts=drafts)) for drafts in (False, True))
    assert expected.drafted[0] > expected.accepted[0] > expected.accepted[1] > 0, "of every kind"
    assert (plain.cached_tokens, plain.snapshots_found) == (32, int(kind == OVER_STATES))
    for depth in depths:
        found = served(triton_engine(tmp_path, DEVICE, depth, drafts=True))
        assert (found.tokens, found.reasons) == (plain.tokens, plain.reasons), depth
        assert found == expected, depth


@pytest.mark.large
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_are_right_at_every_depth(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    write_pair(tmp_path, kind)
    plain = served(triton_engine(tmp_path, DEVICE, 2, drafts=False, dtype=torch.bfloat16))
    found = [served(triton_engine(tmp_path, DEVICE, depth, drafts=True, dtype=torch.bfloat16)) for depth in DEPTHS]
    assert all(one == found[0] for one in found)
    assert (found[0].tokens, found[0].reasons) == (plain.tokens, plain.reasons)
    assert found[0].drafted[0] > found[0].accepted[0] > found[0].accepted[1] > 0
    assert (found[0].cached_tokens, found[0].snapshots_found) == (32, int(kind == OVER_STATES))


@pytest.mark.parametrize("kind", ["eagle-3", "model"])
def test_who_meets_a_size_writes_to_the_null_block_alone_and_what_drafts_meets_it_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    write_pair(tmp_path, kind)
    program = triton_engine(tmp_path, DEVICE, 2, drafts=True, dtype=torch.bfloat16).program
    with torch.inference_mode():
        program.warm_up_layers(LaunchShape(0, 0, Form.PLAIN, rows=3, tokens=32, is_decode=False))
    for cache in (program._cache, program._head._cache.entries):
        for blocks in (*cache.keys, *cache.values):
            assert blocks[1:].isnan().all(), "as they were at the start"
        assert cache.keys[0][0].any(), "padding has been there"
