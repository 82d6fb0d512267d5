"""The long run across 2**31 and 2**32, made short; and that it would see a difference."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from runahead.runtime.programs.cpu.rows import HostRows
from tests.simulation import long_run
from tests.simulation.long_run import DEPTHS, LOG_INTERVAL, WANTED, Differs, Pair, main, run

BEFORE = 10 * LOG_INTERVAL
TURNS = 900


def turned(pair: Pair, turns: int) -> None:
    left = iter(range(turns))
    run([pair], lambda: next(left, None) is None)


# Each depth goes across one border; `make long-run` has all of them at either.
@pytest.mark.parametrize(("depth", "bits"), list(zip(DEPTHS, (32, 31, 32, 31), strict=True)))
def test_an_engine_goes_across_a_border_as_its_control_goes_on(
    depth: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_run, "_DRAIN_TURNS", 300)
    pair = Pair(depth, 1 << bits, BEFORE, seed=35)  # with it each event happens after the border
    turned(pair, TURNS)
    assert {what for what in WANTED if pair.counts[what] <= 0} == set()
    assert pair.counts["launches after the border"] > BEFORE
    assert pair.counts["tokens compared"] > 1000 and pair.counts["requests ended"] > 50
    assert pair.counts["times that all figures were compared"] == TURNS // 300 + 1


def test_the_seed_decides_what_happens() -> None:
    pairs = [Pair(2, 1 << 31, BEFORE, seed) for seed in (5, 5, 6)]
    for pair in pairs:
        turned(pair, 200)
    assert pairs[0].counts == pairs[1].counts != pairs[2].counts


def test_a_token_that_differs_after_the_border_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = HostRows.advance

    def lossy(
        rows: HostRows, indexes: NDArray[np.intp], slots: NDArray[np.int64], tokens: NDArray[np.int32],
        finite: NDArray[np.bool_], offset: int = 0, nothing_left: NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        other = tokens ^ (1 if rows.number > (1 << 31) + 5 else 0)
        advance(rows, indexes, slots, other, finite, offset, nothing_left)

    monkeypatch.setattr(HostRows, "advance", lossy)
    pair = Pair(2, 1 << 31, BEFORE, seed=1)
    with pytest.raises(Differs, match=r"depth 2, turn \d+: message to a front end"):
        turned(pair, TURNS)
    assert pair.launches_after > 0


def test_a_figure_that_differs_is_named() -> None:
    pair = Pair(1, 1 << 32, BEFORE, seed=1)
    pair.turn()
    pair._across.chain.engine.figures.held_back += 1
    with pytest.raises(Differs, match="held_back"):
        pair.finish()


def test_a_run_in_which_too_little_happens_fails_and_says_what(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--minutes", "0", "--depth", "2"]) == 1
    assert "this never happened: depth 2: aborted" in capsys.readouterr().out


def test_a_start_that_would_log_other_launches_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--before", "100"])
    assert "--before must be a multiple of 16" in capsys.readouterr().err
