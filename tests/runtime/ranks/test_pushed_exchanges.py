"""Exchanges by the kernels of GPUs, in Triton's interpreter: each rank a process, the mailboxes in memory that they
share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from runahead.runtime.kernels.triton.ranks.waits import SLOTS
from tests.runtime.ranks.pushed_exchanges import FEW_CHANNELS, LATE_S, SIZES, STEP, Outcome, carved


def outcomes(ranks: int, rounds: int, folder: Path, shared: int = 1 << 30) -> list[Outcome]:
    """Of every rank, in rank order. shared: numbers from which on each rank sums a share."""
    file = folder / "mailboxes"
    with file.open("wb") as made:
        made.truncate(carved(None, ranks)[2])
    command = [sys.executable, "-m", "tests.runtime.ranks.pushed_exchanges", str(ranks), str(file), str(rounds)]
    process = subprocess.run(
        [*command, str(shared)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr.decode()
    return msgspec.json.decode(process.stdout, type=list[Outcome])


@pytest.mark.parametrize(
    ("ranks", "shared"),
    [(2, 1 << 30), (3, 1 << 30), (3, 0), (4, 0), (3, 300)],
    ids=["2", "3", "3 shared", "4 shared", "3 partly shared"],
)
def test_every_rank_has_the_sum_in_rank_order_of_numbers_that_change_from_step_to_step(
    ranks: int, shared: int, tmp_path: Path
) -> None:
    """Where all ranks sum everything, where each sums a share, and where that changes from step to step."""
    found = outcomes(ranks, 3, tmp_path, shared)
    assert all(outcome.reduce_wait_s > LATE_S / 10 for outcome in found[:-1]), "waits for the late rank are counted"
    for outcome in found:
        assert outcome.sums[0] == outcome.sums[1], "sums over ranks"
        assert outcome.gathered[0] == outcome.gathered[1], "what the first rank gathers, and the best of each"
        assert outcome.spread[0] == outcome.spread[1], "what the first rank spreads"
        assert outcome.fault == (0, 0)
        assert 0 < outcome.wait_s[0] == outcome.wait_s[1], "the last spread tells the host"


def test_a_rank_gives_up_its_wait_for_one_that_is_gone_and_names_it(tmp_path: Path) -> None:
    first, _ = outcomes(2, -2, tmp_path)
    of_sums = [-(-size // (FEW_CHANNELS * STEP)) for size in SIZES]
    assert max(of_sums) > SLOTS // 2, "a sum pushes into a place that it has read from"
    assert first.fault == (sum(of_sums) + 2, 1), "after the first round's sums and the one that goes on, the next"
