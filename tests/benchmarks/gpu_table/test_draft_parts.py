"""The parts about drafts: on the CPU their kernels run in Triton's interpreter, but for graphs the code that a GPU
runs; and what the tables make of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu_table import results
from benchmarks.gpu_table.cells import Run
from benchmarks.gpu_table.draft_launches import DRAFTS, Circles
from benchmarks.gpu_table.draft_parts import verify_part
from benchmarks.gpu_table.draft_results import VerifiedLaunch
from benchmarks.gpu_table.draft_tables import verified_table
from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.merge import merge
from benchmarks.gpu_table.parts import PARTS, run_part
from benchmarks.gpu_table.shapes import SHAPES, SMALL, Shape
from benchmarks.gpu_table.tables import tables
from tests.runtime.kernels.triton_device import triton_device

DEVICE: Any = triton_device().type
COMMIT = "0123456789ab"


def small(name: str) -> Shape:
    """A launch of one row, of which one is timed."""
    return replace(SHAPES[name], batches=(1,), workload=replace(SMALL, long=SMALL.short + 2 * (1 + DRAFTS)))


def test_a_row_goes_round_in_a_circle_of_its_own() -> None:
    assert Circles(2, 3).tokens(5).tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 3, 4]]


def check_verified(one: VerifiedLaunch) -> None:
    assert one.plain_ms and one.verified_ms and one.drafter_us and not one.skipped
    assert one.floor_plain_ms and one.floor_verified_ms and len(one.runs_ms) == 1


def test_a_launch_that_verifies_is_timed_beside_a_plain_one_and_keeps_every_draft() -> None:
    """Or the part would say which rows have fewer tokens."""
    found = verify_part(small("tiny"), Run(DEVICE, 1, 300.0, COMMIT))
    assert not found.failures
    (one,) = found.verified
    check_verified(one)
    assert (one.kind, one.rows, one.drafts, one.experts_verified) == ("dense", 1, 3, 0.0)
    assert one.floor_plain_ms == one.floor_verified_ms, "both at the same context"


@pytest.mark.large
@pytest.mark.parametrize("shape", ["tiny-hybrid", "tiny-halves"])
def test_positions_of_one_row_name_different_experts_and_a_state_is_read_once(shape: str) -> None:
    found = verify_part(small(shape), Run(DEVICE, 1, 300.0, COMMIT))
    assert not found.failures
    (one,) = found.verified
    check_verified(one)
    assert one.floor_plain_ms is not None and one.floor_verified_ms is not None
    if shape == "tiny-hybrid":
        assert one.kind == "experts" and one.experts_plain == 2
        assert one.experts_verified is not None and 4 < one.experts_verified <= 8, "as if all routed alike"
        assert one.floor_verified_ms > one.floor_plain_ms
    else:
        assert (one.kind, one.experts_plain) == ("states", 0.0)
        assert one.floor_verified_ms == one.floor_plain_ms


def test_nothing_is_begun_when_the_time_is_up_and_the_file_says_so(tmp_path: Any) -> None:
    found = run_part(PARTS["verify-tiny"], Run(DEVICE, 1, 0.0, COMMIT))
    assert results.read(results.write(found, tmp_path)) == found
    assert found.versions.torch == str(torch.__version__) and found.date and found.commit == COMMIT
    assert found.verified and {one.skipped for one in found.verified} == {"the part had run for 0 s"}
    assert "- no figure for tiny, " in tables(merge([found]))


def test_a_setting_that_is_an_engine_s_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="block_size: this part runs no engine"):
        verify_part(small("tiny"), Run(DEVICE, 1, 300.0, COMMIT, {"block_size": 32}))


def verified(shape: str, kind: Any, rows: int, plain_ms: float, verified_ms: float, **known: Any) -> VerifiedLaunch:
    return VerifiedLaunch(
        shape=shape, kind=kind, rows=rows, drafts=3, exact=False, context=576.0, floor_plain_ms=1.0,
        plain_ms=plain_ms, verified_ms=verified_ms, **{"floor_verified_ms": 1.0, **known},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("launch", "verdict"),
    [
        (verified("8B", "dense", 1, 2.0, 2.2), "| 1.10 | met |"),
        (verified("8B", "dense", 1, 2.0, 2.3), "| 1.10 | missed |"),
        (verified("8B", "dense", 8, 2.0, 2.3), "| 1.15 | met |"),
        (verified("8B", "dense", 64, 2.0, 9.0), "| – | – |"),
        (verified("9B-hybrid", "states", 1, 2.0, 2.3), "| 1.15 | met |"),
        (verified("9B-hybrid", "states", 8, 2.0, 2.3), "| – | – |"),
        (verified("7B-A1B", "experts", 1, 2.0, 6.0, floor_verified_ms=3.0), "| 3.000 | 1.000 | 1.15 | met |"),
        (verified("7B-A1B", "experts", 1, 2.0, 2.3, floor_verified_ms=0.9), "| 1.150 | 1.278 | 1.15 | missed |"),
    ],
)
def test_a_launch_that_verifies_is_held_against_a_plain_one_and_with_experts_against_its_own_floor(
    launch: VerifiedLaunch, verdict: str
) -> None:
    assert verdict in verified_table([launch])[-1]
