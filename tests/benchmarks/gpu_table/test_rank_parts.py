"""The part that times several ranks beside one, on a tiny model."""

from __future__ import annotations

import pytest

from benchmarks.gpu_table import rank_parts
from benchmarks.gpu_table.cells import Run
from benchmarks.gpu_table.shapes import SHAPES


def test_two_ranks_and_one_are_timed_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_parts, "FIRST", (100, 300))
    found = rank_parts.rank_part(SHAPES["tiny"], 2, Run("cpu", 1, 300.0, "0123456789ab"))
    assert not found.failures
    names = ("tiny tp2", "tiny tp1")
    assert [(cell.shape, cell.rows) for cell in found.cells] == [(name, rows) for name in names for rows in (1, 4)]
    assert all(cell.step_ms and cell.overlap for cell in found.cells)
    assert [2 * cell.floor_ms for cell in found.cells[:2]] == [cell.floor_ms for cell in found.cells[2:]]
    assert [(first.shape, first.tokens) for first in found.prompts] == [
        (name, tokens) for name in names for tokens in (100, 300)
    ]
    assert all(first.first_token_ms for first in found.prompts)
    assert found.settings["tensor_parallel"] == 2
